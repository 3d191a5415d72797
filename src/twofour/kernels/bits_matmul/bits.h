// The layouts of weights of codes: where their parts stand, and a weight as a kernel reads it. layout.py writes them.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/integers.h"

namespace twofour {

// Behind the 64-byte header of a layout. A weight is value = alpha * stored + beta.
struct BitsHead {
  int32_t bits;  // of a stored code: 8 of bytes, 4 of halves (two's complement); 1, 2 or 4 of packed ones; of planes, tables, lookups and fours 1 to 8
  int32_t alpha, beta;
  int32_t rest[13];  // what Python writes for itself
};
static_assert(sizeof(BitsHead) == 64);

// What a layout is but for a weight's sizes: outputs of a panel, and the bytes of one with so many inputs.
struct BitsLayout {
  const char* name;
  int64_t panel;
  bool (*takes)(int64_t bits);
  int64_t (*panel_bytes)(int64_t in, int64_t bits);
  bool grouped = false;  // scales and sums stand beside each group of inputs, not before the weights
};

constexpr int64_t kBytesPanel = 64, kPlanesPanel = 32, kTablesPanel = 256, kFoursPanel = 128, kLookupsPanel = 64;
// Of 2:4 weights, 32 inputs of a panel: units of "int8_rows" (layouts/octets.h), or 24 bits for each output, then values.
constexpr int64_t kKeptPanel = 32, kKeptInputs = 32, kKeptUnit = 640;
constexpr int64_t kPackedKeptPanel = 64, kKeptCodes = 3 * kPackedKeptPanel, kPackedKeptUnit = kKeptCodes + 8 * kPackedKeptPanel;
constexpr int64_t kTablesInputs = 6, kFoursInputs = 4;  // bits of a weight that a lookup takes

constexpr BitsLayout kBitsLayouts[] = {
    // [inputs / 4][64 outputs][4] bytes
    {"bits_bytes", kBytesPanel, [](int64_t bits) { return bits == 8; },
     [](int64_t in, int64_t) { return ceil_div(in, 4) * 256; }},
    // the same, 8 / bits fours of inputs in one byte: the first in the lowest bits
    {"bits_packed", kBytesPanel, [](int64_t bits) { return bits == 1 || bits == 2 || bits == 4; },
     [](int64_t in, int64_t bits) { return ceil_div(in, 32 / bits) * 256; }},
    // [plane][inputs / 64][32 outputs] words of 64 bits, the lowest plane first
    {"bits_planes", kPlanesPanel, [](int64_t bits) { return 1 <= bits && bits <= 8; },
     [](int64_t in, int64_t bits) { return ceil_div(in, 64) * bits * 256; }},
    // [plane][inputs / 6][4 vectors][32][2] bytes of 6 bits; the two are outputs 32 apart
    {"bits_tables", kTablesPanel, [](int64_t bits) { return 1 <= bits && bits <= 8; },
     [](int64_t in, int64_t bits) { return ceil_div(in, kTablesInputs) * bits * kTablesPanel; }},
    // [vector][inputs / 6][64] bytes of 6 bits: for every two planes vectors of [32 outputs][2 planes], the lower half of the
    // outputs first, and of a last plane alone one of [32][2], outputs 32 apart. Convolutions have few outputs: one panel has 64
    {"bits_lookups", kLookupsPanel, [](int64_t bits) { return 1 <= bits && bits <= 8; },
     [](int64_t in, int64_t bits) { return ceil_div(in, kTablesInputs) * bits * kLookupsPanel; }},
    // the same of 4 bits, [plane][inputs / 4][2 vectors][32][2]
    {"bits_fours", kFoursPanel, [](int64_t bits) { return 1 <= bits && bits <= 8; },
     [](int64_t in, int64_t bits) { return ceil_div(in, kFoursInputs) * bits * kFoursPanel; }},
    // [inputs / 32][2][16 outputs' indices, a dword each; 4 times 16 outputs' four values, bytes]
    {"bits_2x4_bytes", kKeptPanel, [](int64_t bits) { return bits == 8; },
     [](int64_t in, int64_t) { return ceil_div(in, kKeptInputs) * kKeptUnit; }},
    // [inputs / 32][64 outputs' codes, three bits a four of inputs: 01, 02, 03, 12, 13, 23 are kept][4][2][16 outputs' values
    // of 16 inputs, a dword each: those of the first 8 inputs in the lower half of each byte]
    {"bits_2x4_packed", kPackedKeptPanel, [](int64_t bits) { return bits == 4; },
     [](int64_t in, int64_t) { return ceil_div(in, kKeptInputs) * kPackedKeptUnit; }},
    // codes as bits_packed has them, behind the numbers of each group (GroupShape): this is a panel of one group
    {"bits_groups", kBytesPanel, [](int64_t bits) { return bits == 1 || bits == 2 || bits == 4 || bits == 8; },
     [](int64_t in, int64_t bits) { return ceil_div(in, 32 / bits) * 256; }, true},
};

// What the last plane of a weight counts that is looked up. Of signed codes it is the least level, so that value = stored;
// elsewhere a power of two.
inline int32_t top_plane(const BitsHead& head) {
  const int32_t own = head.rest[2];
  return own != head.beta ? own : 1 << (head.bits - 1);
}

constexpr int64_t kLargestDigit = 128;       // of the three bytes of a real input that groups.h multiplies
constexpr int64_t kMostInGroup = 1 << 16;    // inputs whose sums of 255 times 128 an int32 holds
constexpr int64_t kLargestGroup = 2048;      // of more than 32: 15 times as many fit 16 bits
constexpr int64_t kLeastGroup = 32;  // inputs that fill whole blocks of every width

// A group of inputs of a panel of bits_groups, in bytes: [64 scales][64 sums of values, of 16 bits][64 levels of code 0,
// bytes, where outputs have zero points][codes]. One group of all inputs may have any number of them; its sums have 32 bits.
struct GroupShape {
  int64_t inputs, groups, sum_bytes, zeros, codes, blocks, bytes;

  GroupShape(int64_t in, int64_t bits, int64_t group, bool shifted)
      : inputs(group > 0 ? group : in), groups(in / inputs), sum_bytes(group > 0 ? 2 : 4),
        zeros((4 + sum_bytes) * kBytesPanel),
        codes(zeros + (shifted ? kBytesPanel : 0)), blocks(ceil_div(inputs, 32 / bits)), bytes(codes + blocks * 256) {}
};

inline const BitsLayout* bits_layout(const char* name) {
  for (const BitsLayout& layout : kBitsLayouts)
    if (std::strcmp(layout.name, name) == 0) return &layout;
  return nullptr;
}

// Where the parts of a layout stand, in bytes behind the header: scales and sums have whole panels.
struct BitsPlaces {
  int64_t scales, sums, weights, end;

  BitsPlaces(const BitsLayout& layout, int64_t out, int64_t in, int64_t bits, int64_t group = 0, bool shifted = false) {
    const int64_t panels = ceil_div(out, layout.panel);
    const int64_t numbers = layout.grouped ? 0 : round_up(panels * layout.panel * 4, 64);
    const GroupShape shape(in, bits, group, shifted);
    scales = sizeof(BitsHead);
    sums = scales + numbers;
    weights = sums + numbers;
    end = weights + panels * (layout.grouped ? shape.groups * shape.bytes : layout.panel_bytes(in, bits));
  }
};

}  // namespace twofour

namespace {

using twofour::BitsHead;

// A layout as a kernel reads it; the border has held its size against its head.
struct BitsWeight {
  const BitsHead& head;
  int64_t panels, panel_bytes;
  const float* scales;
  const int32_t* sums;  // of the values of a row
  const char* weights;

  BitsWeight(const twofour::BitsLayout& layout, const void* data, int64_t out, int64_t in)
      : head(*static_cast<const BitsHead*>(data)), panels(ceil_div(out, layout.panel)),
        panel_bytes(layout.panel_bytes(in, head.bits)) {
    const twofour::BitsPlaces places(layout, out, in, head.bits);
    const char* base = static_cast<const char*>(data);
    scales = reinterpret_cast<const float*>(base + places.scales);
    sums = reinterpret_cast<const int32_t*>(base + places.sums);
    weights = base + places.weights;
  }
  const char* panel(int64_t p) const { return weights + p * panel_bytes; }
};

}  // namespace
