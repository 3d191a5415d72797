// int4 weights against float activations: vectors hold output rows, half bytes become floats in the register, and each
// row picks its inputs from a broadcast group of four by its code (design C of ../nm_matmul/README.md).
//
// Exact up to the rounding of float sums. For CPUs without VNNI. V: native/simd.h. Everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/layouts/int4.h"
#include "kernels/epilogue_math.h"
#include "kernels/matmul.h"
#include "kernels/row_shape.h"
#include "native/compiler.h"
#include "native/team.h"

namespace {

using twofour::Int4Unit;
using twofour::kInt4BlockBytes;
using twofour::kInt4Half;
using twofour::kInt4Offset;
using twofour::kInt4Rows;
using twofour::kInt4Tile;
using twofour::Matmul;
using twofour::Type;

inline float wide(uint16_t bfloat16) { return __builtin_bit_cast(float, static_cast<uint32_t>(bfloat16) << 16); }

inline uint16_t narrow(float value) {  // to nearest, ties to even; NaN stays NaN
  const auto bits = __builtin_bit_cast(uint32_t, value);
  return static_cast<uint16_t>(value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float read(const void* from, Type type, int64_t at) {
  return type == Type::f32 ? static_cast<const float*>(from)[at] : wide(static_cast<const uint16_t*>(from)[at]);
}

// Dense: the weight of kernels/dense_matmul/int4 instead, every value with its own input.
template <class V, bool Dense = false>
struct Int4Floats {
  using F = typename V::reg;
  using I = typename V::U;
  static constexpr int kWidth = V::width;

  static I load(const uint8_t* p) {
    I v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }

  // What lane i of a vector makes of its half bytes: real = value * scale + offset, exact in float.
  struct Scale {
    F scale, offset;
  };
  static Scale scale_of(const Matmul& a, const Int4Unit& at, const uint8_t* unit, int64_t group, int64_t lane) {
    float scales[kWidth], offsets[kWidth];
    for (int i = 0; i < kWidth; i++) {
      uint16_t stored;
      __builtin_memcpy(&stored, unit + at.scales + (group * kInt4Rows + lane + i) * 2, 2);
      scales[i] = wide(stored);
      const int zero = a.zeros ? unit[at.zeros + group * kInt4Rows + lane + i] : kInt4Offset;
      offsets[i] = -scales[i] * static_cast<float>(zero);
    }
    Scale result;
    __builtin_memcpy(&result.scale, scales, sizeof scales);
    __builtin_memcpy(&result.offset, offsets, sizeof offsets);
    return result;
  }

  static constexpr int64_t kBlockBytes = Dense ? twofour::kInt4DenseBlockBytes : kInt4BlockBytes;

  template <int T>
  static TWOFOUR_INLINE void add_dense_block(const uint8_t* values_at, const Scale& real, const float* x,
                                             F (&sums)[2][T]) {
    TWOFOUR_UNROLL
    for (int g = 0; g < 8; g++) {
      const I values = load(values_at + g / 2 * 64);
      TWOFOUR_UNROLL
      for (int i = 0; i < 4; i++) {
        const F w = __builtin_convertvector(values >> (8 * i + g % 2 * 4) & 15, F) * real.scale + real.offset;
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++) sums[i % 2][t] += w * x[(g * T + t) * 4 + i];
      }
    }
  }

  // One block of kWidth rows against T tokens; x is [group of 4][token][4]. Two chains of sums hide the latency.
  template <int T>
  static TWOFOUR_INLINE void add_block(const uint8_t* codes_at, const uint8_t* values_at, const Scale& real,
                                       const float* x, F (&sums)[2][T]) {
    const I codes = load(codes_at);
    TWOFOUR_UNROLL
    for (int s = 0; s < 4; s++) {
      const I values = load(values_at + s / 2 * 64);
      TWOFOUR_UNROLL
      for (int g = 2 * s; g < 2 * s + 2; g++) {
        const int first = g % 2 * 16 + s % 2 * 4;
        const F w0 = __builtin_convertvector(values >> first & 15, F) * real.scale + real.offset;
        const F w1 = __builtin_convertvector(values >> (first + 8) & 15, F) * real.scale + real.offset;
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++) {
          const F four = V::broadcast4(x + (g * T + t) * 4);
          sums[0][t] += w0 * V::permute4(four, (typename V::ireg)(codes >> 4 * g));
          sums[1][t] += w1 * V::permute4(four, (typename V::ireg)(codes >> (4 * g + 2)));
        }
      }
    }
  }

  // Bias, epilogue and store of kWidth outputs of one token.
  static void finish(const Matmul& a, int64_t t, int64_t row, F y) {
    const int64_t left = a.out_features - row, count = left < kWidth ? left : kWidth;
    float lanes[kWidth] = {}, others[kWidth] = {};
    for (int64_t i = 0; i < count; i++) {
      lanes[i] = a.bias == nullptr ? 0.0f : a.bias[row + i];
      if (a.epilogue.combine != Combine::none)
        others[i] = read(a.epilogue.other, a.y_type, t * a.epilogue.other_stride + row + i);
    }
    F bias, other;
    __builtin_memcpy(&bias, lanes, sizeof lanes);
    __builtin_memcpy(&other, others, sizeof others);
    y += bias;
    if (!a.epilogue.plain()) y = apply_activation<V>(y, a.epilogue.activation);
    if (a.epilogue.combine != Combine::none) y = apply_combine<V>(y, other, a.epilogue.combine);
    __builtin_memcpy(lanes, &y, sizeof lanes);
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = t * a.y_stride + row + i;
      if (a.y_type == Type::f32) static_cast<float*>(a.y)[at] = lanes[i];
      else static_cast<uint16_t*>(a.y)[at] = narrow(lanes[i]);
    }
  }

  template <int T>
  static TWOFOUR_NOINLINE void units(const Matmul& a, const float* x, int64_t first, int64_t u0, int64_t u1) {
    const Int4Unit at(a.in_features, a.group, a.zeros, kBlockBytes);
    for (int64_t u = u0; u < u1; u++) {
      const uint8_t* unit = static_cast<const uint8_t*>(a.weight) + u * at.bytes;
      for (int64_t lane = 0; lane < kInt4Rows && u * kInt4Rows + lane < a.out_features; lane += kWidth) {
        const uint8_t* half = unit + at.blocks + lane / kInt4Half * (kBlockBytes / 2) + lane % kInt4Half * 4;
        F sums[2][T] = {};
        for (int64_t tile = 0; tile < at.tiles;) {
          const Scale real = scale_of(a, at, unit, tile / at.group_tiles, lane);
          for (int64_t end = tile + at.group_tiles; tile < end; tile++, half += kBlockBytes) {
            if constexpr (Dense) add_dense_block<T>(half, real, x + tile * kInt4Tile * T, sums);
            else add_block<T>(half, half + 64, real, x + tile * kInt4Tile * T, sums);
          }
        }
        for (int t = 0; t < T; t++) finish(a, first + t, u * kInt4Rows + lane, sums[0][t] + sums[1][t]);
      }
    }
  }

  template <int T>
  static void units_of(int64_t tokens, const Matmul& a, const float* x, int64_t first, int64_t u0, int64_t u1) {
    if (tokens == T) return units<T>(a, x, first, u0, u1);
    if constexpr (T > 1) units_of<T - 1>(tokens, a, x, first, u0, u1);
  }

  // Tokens [first, first + tokens) -> x[group][token][4], zero past in_features.
  static void copy_tokens(const Matmul& a, const Team& team, int64_t first, int64_t tokens, float* to) {
    int64_t g0, g1;
    team.share((a.in_features + kInt4Tile - 1) / kInt4Tile * (kInt4Tile / 4), 1, &g0, &g1);
    for (int64_t g = g0; g < g1; g++)
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < 4; i++)
          to[(g * tokens + t) * 4 + i] =
              g * 4 + i < a.in_features ? read(a.x, a.x_type, (first + t) * a.x_stride + g * 4 + i) : 0.0f;
  }

  static int64_t workspace(const Matmul& a) {
    return (a.in_features + kInt4Tile - 1) / kInt4Tile * kInt4Tile * kRowTokens<V> * 4;
  }

  static void run(const Matmul& a) {
    auto* x = static_cast<float*>(a.workspace);
    with_team(a.threads, [&](const Team& team) {
      int64_t u0, u1;
      team.share((a.out_features + kInt4Rows - 1) / kInt4Rows, 1, &u0, &u1);
      for (int64_t first = 0; first < a.tokens; first += kRowTokens<V>) {
        const int64_t tokens = a.tokens - first < kRowTokens<V> ? a.tokens - first : kRowTokens<V>;
        if (first > 0) team.barrier();  // the last tokens are still being read
        copy_tokens(a, team, first, tokens, x);
        team.barrier();
        units_of<kRowTokens<V>>(tokens, a, x, first, u0, u1);
      }
    });
  }
};

}  // namespace
