// The weight of a product with 2:4 zeros, packed from the dense constants of an ONNX file, and which kernel multiplies by it.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "kernels/layouts/layout.h"
#include "kernels/products.h"
#include "native/runtime/program_file.h"

namespace twofour::ort {

// A constant W (out, in) of a product x W^T as it lies in memory: value (o, i) at o * out_step + i * in_step, one of which is 1.
struct DenseWeight {
  const float* data;
  int64_t out, in, out_step, in_step;
  std::vector<float> bias;  // empty for none
};

// Whether of every four values along `in`, which is to be a multiple of four, at most two are not zero.
bool is_two_four(const DenseWeight& weight);

class SparseWeight {
 public:
  // Weights of one `in`, one below the other; throws Failed where they differ. Nothing of them is kept.
  explicit SparseWeight(const std::vector<DenseWeight>& parts);

  int64_t out() const { return shape_.out; }
  int64_t in() const { return shape_.in; }

  // The product for so many tokens: the first call of each power of two measures, on rows of x or on zeros, every kernel that
  // this CPU has the instructions of. Several threads may call it.
  Part part(const float* x, int64_t tokens, int threads);

 private:
  struct Canonical {
    std::vector<float> values;
    std::vector<uint8_t> indices;
  };
  void append(const DenseWeight& part);
  AlignedMemory packed(const Layout& layout);
  Part with(const Product& product, const AlignedMemory& packed) const;
  const Product* race(const float* x, int64_t tokens, int threads);

  WeightShape shape_{};
  Canonical canonical_;  // until there is a layout
  std::vector<float> bias_;
  std::mutex mutex_;
  std::map<const Layout*, AlignedMemory> layouts_;
};

}  // namespace twofour::ort
