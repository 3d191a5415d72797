// One float32 value with the operations of the vector types: the fused kernels on any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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
  // bfloat16: the upper half of a float. Stores round to nearest even, a NaN stays one.
  static reg load(const uint16_t* p) {
    const uint32_t bits = uint32_t{*p} << 16;
    float v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  static reg load(const uint16_t* p, int64_t count) { return count > 0 ? load(p) : 0.0f; }
  static void store(uint16_t* p, reg v) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof v);
    *p = static_cast<uint16_t>((v == v ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000) >> 16);
  }
  static void store(uint16_t* p, reg v, int64_t count) {
    if (count > 0) store(p, v);
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
