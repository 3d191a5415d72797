// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), W packed: the call of every product with a weight.
#pragma once

#include <cstdint>

#include "epilogue.h"
#include "native/table.h"
#include "native/type.h"

namespace twofour {

struct CodedAnswer;  // bits_matmul/coded_answer.h

// How whole numbers stand for real ones: real = scale * (q - zero). `dynamic`: x is real and the kernel chooses scale
// and zero for every token.
struct Quantization {
  bool dynamic;
  float x_scale;
  int32_t x_zero;
  float y_scale;
  int32_t y_zero;
  // Products of codes (bits_matmul): the greatest whole number of an input, and what codes u stand for, real = scale *
  // (x_factor * u - zero), factor 0 where x stays real. `x_centred`: a dynamic range lies around zero.
  int32_t x_most = 255;
  int32_t x_factor = 1;
  bool x_centred = false;
};

// One call. Strides are in elements. `weight` is 64-byte aligned and holds the bytes that the kernel's layout packed
// with the same out_features and in_features; `bias` may be null. `workspace` is 64-byte aligned, of
// workspace_bytes(args) bytes, and may hold garbage: it is all the scratch there is, so calls are re-entrant. Whatever
// bytes `weight` holds, a kernel stays inside its operands; where an index says more than its layout can, it sets
// `damaged` and y is unspecified.
struct Matmul {
  const void* x;
  Type x_type;
  int64_t x_stride;
  const void* weight;
  const float* bias;
  void* y;
  Type y_type;
  int64_t y_stride;
  int64_t tokens, out_features, in_features;
  int64_t group;  // inputs per scale of the weight, 0 when a row has one scale or none
  bool zeros;     // whether the weight's groups have zero points
  Epilogue epilogue;
  Quantization quantization;
  int threads;
  void* workspace;
  bool* damaged;
  bool columns = false;  // x is (in_features, tokens), y (out_features, tokens); panel layouts, no bias, no epilogue
  // Rows of the weight are taken from the last to the first, by kernels that have it so: where the call before ended, the
  // caches hold the weight. The answer is the same.
  bool upwards = false;
  // What writes rows [begin, end) of x before they are read, each once, by the member that reads them first; may be null.
  // Rows of float32 panels do it.
  void (*rows_wanted)(const void* state, int64_t begin, int64_t end) = nullptr;
  const void* wanted_state = nullptr;
  // What is done with whole rows of y while they are in a cache, rows [begin, end) at a time and each once; may be null.
  // Rows of float32 panels do it.
  void (*rows_done)(const void* state, int64_t begin, int64_t end) = nullptr;
  const void* rows_state = nullptr;
  // Products of codes: what makes codes of the next one's inputs of an answer, bytes with a mark of NaN behind each row; null:
  // it leaves as y_type says. `marked`: so are the rows of x.
  const CodedAnswer* coded = nullptr;
  bool marked = false;
  // Inputs from `split` on, a multiple of 16 (bfloat16: 32), stand in rows of their own, (tokens, in_features - split), of x's type;
  // null: all are in x. Products of 2:4 in float32, bfloat16 and int8 read them there, but for those of AMX.
  const void* more = nullptr;
  int64_t split = 0, more_stride = 0;
};

// A row of a table of products: correct for any tokens >= 0. Ask the CPU before anything of it is called.
struct MatmulKernel : RowBase {
  int64_t (*workspace_bytes)(const Matmul&);
  void (*run)(const Matmul&);
};

}  // namespace twofour

namespace {

inline const float* x_of(const twofour::Matmul& a) { return static_cast<const float*>(a.x); }
inline float* y_of(const twofour::Matmul& a) { return static_cast<float*>(a.y); }

// How many inputs stand in x; those behind them in `more`.
inline int64_t inputs_in_x(const twofour::Matmul& a) { return a.more == nullptr ? a.in_features : a.split; }
// Input k of a token and those that stand behind it.
inline const float* input_at(const twofour::Matmul& a, int64_t token, int64_t k) {
  if (a.more == nullptr || k < a.split) return x_of(a) + token * a.x_stride + k;
  return static_cast<const float*>(a.more) + token * a.more_stride + (k - a.split);
}

}  // namespace
