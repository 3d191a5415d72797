// What makes codes of the next product's inputs of an answer.
#pragma once

#include <cstdint>

namespace twofour {

constexpr int32_t kBitsOfRow = 256;  // floats around a change of code of which each has a bit of its own, in a row of bits

// Of one step of a line: `below` up to float number `begin`, `above` from `rows` rows of bits behind it on, between them what
// these bits say, the first of them those of `row`. Floats are numbered in their order, 0.0 being 0.
struct CodeStep {
  int32_t begin;
  uint8_t below, above, row, rows;
};

// A table of steps as it comes to the border: this head, `count` steps, and `rows` rows of bits.
struct CodeStepsHead {
  float factor, offset;
  int32_t count, rows;
};
static_assert(sizeof(CodeStepsHead) == 16 && sizeof(CodeStep) == 8);

struct CodedAnswer {
  int32_t least, most;          // of a code, where it is a rounded number
  const float *scale, *shift;   // of a normalisation of each output, or null
  // The code of y, with steps: that of step clamp(nearest even(y * factor + offset), 0, count - 1).
  float factor, offset;
  int32_t count;
  const CodeStep* steps;  // or null
  const uint32_t* bits;
  // Where the steps are those of the epilogue's activation: how far from a whole number a formula's answer, in steps of codes,
  // says that code; 0: no formula does.
  float margin;
};

}  // namespace twofour
