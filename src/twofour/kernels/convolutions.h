// Every native convolution with a prepared weight, whatever its family: what a chain asks that runs convolutions inside. A
// family adds its rows where it is bound; nothing is known of them here but what the tables say.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conv_activation.h"
#include "conv_axis.h"
#include "native/binding.h"

namespace twofour {

// One call: y = activation(conv(x, W) + bias + other), channels last. `weight` stands as the row's family has it.
struct Convolution {
  const float* x;
  const char* weight;
  int64_t weight_bytes;
  const float *bias, *other;  // may be null
  float* y;
  int64_t images, in_channels, out_channels, groups;
  ConvAxis height, width;
  ConvActivation activation;
  int threads;
  void* workspace;
  bool* damaged;  // set where the bytes of a weight say what no packing writes
  int64_t plane = 0;  // not 0: the channels of x are so many floats apart, each an image without gaps
};

struct ConvolutionRow {
  const RowBase* row;
  int64_t (*workspace_bytes)(const RowBase&, const Convolution&);
  void (*run)(const RowBase&, const Convolution&);
  // Finds the weight, and refuses one that was not made for these sizes, and sizes that the row does not take.
  void (*read)(const Border&, const RowBase&, const Operand& weight, Convolution*);
  // Whether it takes an x whose channels stand apart.
  bool (*takes_planes)(const RowBase&, const Convolution&) = [](const RowBase&, const Convolution&) { return false; };
};

inline std::vector<ConvolutionRow>& convolutions() {
  static auto& all = *new std::vector<ConvolutionRow>;  // never destroyed: a thread may be at work while the process ends
  return all;
}

// Adds the rows of a family, whose functions are those of `like`; Python reads `convolutions`, their names in order.
template <class Row, size_t kCount>
void add_convolutions(nb::module_& m, const Row (&rows)[kCount], ConvolutionRow like) {
  nb::list names;
  for (const Row& row : rows) {
    like.row = &row;
    convolutions().push_back(like);
    names.append(row.name);
  }
  append_to(m, "convolutions", names);
}

// The convolution at that place of `convolutions`, whose instructions this CPU has.
inline const ConvolutionRow& convolution_at(int index) {
  if (index < 0 || static_cast<size_t>(index) >= convolutions().size())
    throw std::out_of_range("no such convolution");
  const ConvolutionRow& found = convolutions()[static_cast<size_t>(index)];
  if (!cpu_has(found.row->isa)) no_such_instructions(found.row->name, found.row->isa);
  return found;
}

// An argument that is such a place.
struct ConvolutionAt : NumberArgument {
  static std::string name(int place) { return convolutions().at(static_cast<size_t>(place)).row->name; }
  static int find(const std::string& name) {
    for (size_t i = 0; i < convolutions().size(); i++)
      if (name == convolutions()[i].row->name) return convolution_at(static_cast<int>(i)), static_cast<int>(i);
    no_such_kernel(name);
  }
};
template <>
struct Argument<ConvolutionAt> : NamedArgument<ConvolutionAt, ConvolutionAt> {};

}  // namespace twofour
