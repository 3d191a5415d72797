// Rows of masks, packing and products against sums in double, without Python: for processors that an emulator stands in
// for (`make test-arm`). Every row of the three tables that the CPU has is swept; those it lacks are named.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/nm_compress/nm_compress.h"
#include "kernels/layouts/layout.h"
#include "kernels/nm_matmul/nm_matmul.h"
#include "native/isa.h"
#include "native/scratch.h"
#include "patterns/nm_mask.h"

using namespace twofour;

namespace {

constexpr KernelRow<bool(const NmMask&)> kMasks[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_mask", __VA_ARGS__}, symbol},
#include "patterns/nm_mask.inc"
#undef TWOFOUR_ROW
};
constexpr KernelRow<int64_t(const NmCompress&)> kCompress[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_compress", __VA_ARGS__}, symbol},
#include "kernels/nm_compress/nm_compress.inc"
#undef TWOFOUR_ROW
};

std::mt19937 source(1);
float normal() { return std::normal_distribution<float>()(source); }
float small() { return static_cast<float>(static_cast<int>(source() % 7) - 3); }  // many ties and zeros

[[noreturn]] void fail(const RowBase& row, const std::string& what) {
  std::printf("%s: %s\n", row.name, what.c_str());
  std::exit(1);
}
void require(bool fits, const RowBase& row, const std::string& what) {
  if (!fits) fail(row, what);
}

// The n of m with the largest key, the lowest index of equals.
std::vector<bool> largest(const float* group, int n, int m, bool absolute) {
  std::vector<bool> keep(static_cast<size_t>(m));
  const auto key = [&](int i) { return absolute ? std::fabs(double{group[i]}) : double{group[i]}; };
  for (int i = 0; i < m; i++) {
    int before = 0;
    for (int j = 0; j < m; j++) before += key(j) > key(i) || (key(j) == key(i) && j < i);
    keep[static_cast<size_t>(i)] = before < n;
  }
  return keep;
}

void check_mask(const KernelRow<bool(const NmMask&)>& row) {
  for (const int64_t groups : {1, 2, 3, 7, 64, 1001})
    for (const bool absolute : {false, true})
      for (const bool ties : {false, true}) {
        std::vector<float> scores(static_cast<size_t>(4 * groups));
        for (float& score : scores) score = ties ? small() : normal();
        std::vector<uint8_t> keep(scores.size() + 16, 7);
        require(row.run({scores.data(), keep.data() + 8, groups, 2, 4, absolute}), row, "finite scores are refused");
        for (size_t i = 0; i < scores.size(); i++)
          require(keep[8 + i] == largest(&scores[i / 4 * 4], 2, 4, absolute)[i % 4], row, "another value is kept");
        for (size_t i = 0; i < 8; i++)
          require(keep[i] == 7 && keep[keep.size() - 1 - i] == 7, row, "written outside of the mask");
        for (const float bad : {NAN, INFINITY, -INFINITY}) {
          scores[source() % scores.size()] = bad;
          require(!row.run({scores.data(), keep.data() + 8, groups, 2, 4, absolute}), row, "a bad score is taken");
        }
      }
}

// A 2:4 weight in the canonical form of layout.h.
struct Weight {
  int64_t out, in;
  std::vector<float> dense, kept;
  std::vector<uint8_t> indices;

  Weight(int64_t o, int64_t i) : out(o), in(i), dense(static_cast<size_t>(o * i)) {
    indices.assign(static_cast<size_t>(out * ((in + 7) / 8)), 0);
    for (int64_t r = 0; r < out; r++)
      for (int64_t g = 0; g < in / 4; g++) {
        const int first = static_cast<int>(source() % 3), second = first + 1 + static_cast<int>(source() % (3 - first));
        for (const int place : {first, second}) {
          const float steps = std::fmax(-127.0f, std::fmin(127.0f, std::round(normal() * 64)));
          const float value = std::ldexp(steps, -6);  // bfloat16 and 8 bits hold it
          dense[static_cast<size_t>(r * in + 4 * g + place)] = value;
          kept.push_back(value);
        }
        indices[static_cast<size_t>(r * ((in + 7) / 8) + g / 2)] |=
            static_cast<uint8_t>((first | second << 2) << (g % 2 * 4));
      }
  }
};

void check_compress(const KernelRow<int64_t(const NmCompress&)>& row) {
  for (const int64_t columns : {4, 8, 12, 64, 68})
    for (const int64_t rows : {1, 3, 33})
      for (const int threads : {1, 2}) {
        const int64_t stride = columns + 4;
        std::vector<float> weight(static_cast<size_t>(rows * stride));
        std::vector<float> values(static_cast<size_t>(rows * columns / 2 + 4), 99);
        for (float& value : weight) value = threads == 1 ? small() : normal();
        std::vector<uint8_t> codes(static_cast<size_t>(rows * ((columns + 7) / 8) + 4), 0x77);
        const int64_t dropped =
            row.run({weight.data(), stride, rows, columns, values.data(), codes.data(), threads});
        int64_t want = 0, at = 0;
        for (int64_t r = 0; r < rows; r++)
          for (int64_t c = 0; c < columns; c += 4) {
            const float* group = &weight[static_cast<size_t>(r * stride + c)];
            const std::vector<bool> keep = largest(group, 2, 4, true);
            int code = 0, shift = 0;
            for (int i = 0; i < 4; i++) {
              if (!keep[static_cast<size_t>(i)]) want += group[i] != 0;
              if (!keep[static_cast<size_t>(i)]) continue;
              require(values[static_cast<size_t>(at++)] == group[i], row, "another value is packed");
              code |= i << shift;
              shift += 2;
            }
            const int byte = codes[static_cast<size_t>(r * ((columns + 7) / 8) + c / 8)];
            require((byte >> (c / 4 % 2 * 4) & 15) == code, row, "another index is packed");
          }
        require(dropped == want, row, "another number of values is dropped");
        const bool kept = values[static_cast<size_t>(at)] == 99 && codes[codes.size() - 4] == 0x77;
        require(kept, row, "written behind the end");
      }
}

uint16_t upper_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_half(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Aligned {
  explicit Aligned(int64_t bytes) : data(allocate_aligned(64, static_cast<size_t>((bytes + 127) / 64 * 64))) {
    std::memset(data, 0xFF, static_cast<size_t>(bytes));  // NaN
  }
  ~Aligned() { free_aligned(data); }
  void* data;
};

std::vector<float> product(const NmMatmulKernel& row, const Weight& weight, const void* packed,
                           const std::vector<float>& x, const std::vector<float>& bias, int64_t tokens, int threads) {
  const int64_t stride = weight.out + 5;
  std::vector<float> y(static_cast<size_t>(tokens * stride + 8), 99);
  bool damaged = false;
  Matmul args{x.data(), Type::f32, weight.in + 3, packed, bias.data(), y.data(), Type::f32, stride, tokens,
                weight.out, weight.in, 0, false, {Activation::none, Combine::none, nullptr, 0}, {true, 0, 0, 0, 0},
                threads, nullptr, &damaged};
  const Aligned workspace(row.workspace_bytes(args));
  args.workspace = workspace.data;
  row.run(args);
  require(!damaged, row, "a sound weight is called damaged");
  for (int64_t i = 0; i < static_cast<int64_t>(y.size()); i++)
    require((i < tokens * stride && i % stride < weight.out) == (y[static_cast<size_t>(i)] != 99), row,
            "written beside the answer, or not all of it");
  return y;
}

void check_product(const NmMatmulKernel& row) {
  const bool whole = std::strcmp(row.dtype, "int8") == 0, half = std::strcmp(row.dtype, "bfloat16") == 0;
  const int64_t shapes[][2] = {{1, 4}, {5, 12}, {17, 68}, {33, 260}, {96, 32}, {385, 132}};
  for (const auto& shape : shapes) {
    const Weight weight(shape[0], shape[1]);
    const WeightShape size{weight.out, weight.in, 0, false};
    const Aligned packed(row.order->bytes(size));
    std::vector<uint16_t> halves;
    std::vector<int8_t> bytes;
    std::vector<float> scales(static_cast<size_t>(weight.out), 1.0f / 64);
    for (const float value : weight.kept) {
      halves.push_back(upper_half(value));
      bytes.push_back(static_cast<int8_t>(value * 64));
    }
    const void* values = whole ? static_cast<void*>(bytes.data()) : halves.data();
    if (!whole && !half) values = weight.kept.data();
    row.order->pack(size, {values, weight.indices.data(), whole ? scales.data() : nullptr, nullptr}, packed.data);
    for (const int64_t tokens : {1, 2, 7, 9, 17, 65})
      for (const int threads : {1, 2}) {
        std::vector<float> x(static_cast<size_t>(tokens * (weight.in + 3)), NAN), bias(static_cast<size_t>(weight.out));
        for (float& one : bias) one = normal();
        for (int64_t t = 0; t < tokens; t++)
          for (int64_t c = 0; c < weight.in; c++) x[static_cast<size_t>(t * (weight.in + 3) + c)] = normal();
        const std::vector<float> y = product(row, weight, packed.data, x, bias, tokens, threads);
        for (int64_t t = 0; t < tokens; t++) {
          float least = 0, most = 0;
          for (int64_t c = 0; c < weight.in; c++) {
            least = std::fmin(least, x[static_cast<size_t>(t * (weight.in + 3) + c)]);
            most = std::fmax(most, x[static_cast<size_t>(t * (weight.in + 3) + c)]);
          }
          for (int64_t r = 0; r < weight.out; r++) {
            double want = bias[static_cast<size_t>(r)], sizes = std::fabs(want), weights = 0;
            for (int64_t c = 0; c < weight.in; c++) {
              const double w = weight.dense[static_cast<size_t>(r * weight.in + c)];
              float one = x[static_cast<size_t>(t * (weight.in + 3) + c)];
              if (half) one = from_half(upper_half(one));
              want += w * one, sizes += std::fabs(w * one), weights += std::fabs(w);
            }
            // Sums: 2^-22 of all that is added; int8: activations to half a step of 255, and their ends rounded.
            const double step = whole ? (most - least) / 255.0 : 0;
            const double bound = sizes * 2.4e-7 * std::sqrt(static_cast<double>(weight.in)) + step * weights;
            const double got = y[static_cast<size_t>(t * (weight.out + 5) + r)];
            require(std::fabs(got - want) <= bound, row,
                    "a product is " + std::to_string(got) + ", not " + std::to_string(want));
          }
        }
        if (whole) {  // the same bits as the portable row
          for (int i = 0; i < kNmMatmulKernelCount; i++) {
            const NmMatmulKernel& other = kNmMatmulKernels[i];
            if (std::strcmp(other.dtype, "int8") == 0 && std::strcmp(other.isa, "scalar") == 0)
              require(y == product(other, weight, packed.data, x, bias, tokens, 1), row, "not the portable row's bits");
          }
        }
      }
  }
}

int swept = 0;
template <class Row, class Check>
void sweep(const Row* rows, int count, const Check& check, bool (*takes)(const RowBase&)) {
  for (int i = 0; i < count; i++) {
    if (!takes(rows[i])) continue;
    if (!cpu_has(rows[i].isa)) {
      std::printf("%s: not run, this CPU has no %s\n", rows[i].name, rows[i].isa);
      continue;
    }
    check(rows[i]);
    std::printf("%s: right\n", rows[i].name);
    std::fflush(stdout);
    swept++;
  }
}

}  // namespace

int main() {
  const auto all = [](const RowBase&) { return true; };
  sweep(kMasks, static_cast<int>(sizeof kMasks / sizeof *kMasks), check_mask, all);
  sweep(kCompress, static_cast<int>(sizeof kCompress / sizeof *kCompress), check_compress, all);
  sweep(kNmMatmulKernels, kNmMatmulKernelCount, check_product,
        [](const RowBase& row) { return std::strcmp(row.dtype, "int4") != 0; });
  std::printf("%d rows are right\n", swept);
}
