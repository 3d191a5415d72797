// One float32 value with the operations of the vector types: the fused kernels on any processor.
#pragma once

#include <cmath>
#include <cstdint>

namespace {

struct Floats {
  using reg = float;
  static constexpr int width = 1;

  static reg zero() { return 0.0f; }
  static reg all(float value) { return value; }
  static reg load(const float* p) { return *p; }
  static reg load(const float* p, int64_t count) { return count > 0 ? *p : 0.0f; }
  static reg load_once(const float* p) { return *p; }
  static reg spread_once(const float* p) { return *p; }
  static void store(float* p, reg v) { *p = v; }
  static void store(float* p, reg v, int64_t count) {
    if (count > 0) *p = v;
  }
  static reg add(reg a, reg b) { return a + b; }
  static reg sub(reg a, reg b) { return a - b; }
  static reg mul(reg a, reg b) { return a * b; }
  static reg max(reg a, reg b) { return a > b ? a : b; }
  static reg fma(reg a, reg b, reg c) { return a * b + c; }
  static reg round(reg a) { return std::nearbyintf(a); }
  static reg scale_from(float least, reg x, reg a, reg n) {
    if (x < least) return 0.0f;
    return n == n ? std::ldexp(a, static_cast<int>(n)) : a;
  }
  static reg where_byte(const uint8_t* bytes, int64_t count, reg v, reg other) { return count > 0 && *bytes ? v : other; }
  static float sum(reg a) { return a; }
  static float largest(reg a) { return a; }
  static void transpose(reg (&)[1]) {}
};

}  // namespace
