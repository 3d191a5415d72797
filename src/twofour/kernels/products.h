// Every native product with a prepared weight, whatever its family: what an operation asks that runs products inside. A
// family adds its rows where it is bound; nothing is known of them here but what the tables say.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layouts/packed_weight.h"
#include "matmul.h"
#include "native/binding.h"
#include "native/operand.h"

namespace twofour {

struct Product {
  const RowBase* row;
  int64_t (*workspace_bytes)(const Matmul&);
  void (*run)(const Matmul&);
  // Holds the bytes of a weight, whose header is of this row, against the sizes that the header says.
  void (*require)(const RowBase& row, const PackedWeight& weight);
  bool runs;  // whether this CPU has its instructions: asking takes longer than a small product
  bool whole_rows;  // whether it runs `Matmul::rows_wanted` and `rows_done`; else norms of its rows stand beside it
};

// A product y (rows, out) = x (rows, in) W^T + bias inside an operation.
struct Part {
  const Product* product = nullptr;
  const void* weight = nullptr;
  const float* bias = nullptr;
  int64_t out = 0, in = 0, group = 0;
  bool zeros = false;
  Quantization range{true, 1, 0, 1, 0};  // of rows of whole numbers: those of x, and of y where that is bytes

  // x and y are float32 or bfloat16, or bytes where the range is static.
  Matmul call(const void* x, int64_t x_stride, void* y, int64_t rows, int threads, Type from, Type to) const {
    return {x, from, x_stride, weight, bias, y, to, out, rows, out, in, group, zeros,
            {Activation::none, Combine::none, nullptr, 0}, range, threads, nullptr, nullptr};
  }
  Matmul call(const void* x, int64_t x_stride, void* y, int64_t rows, int threads, Type type = Type::f32) const {
    return call(x, x_stride, y, rows, threads, type, type);
  }
  int64_t workspace(int64_t rows, int threads, Type from, Type to) const {
    return product == nullptr ? 0 : product->workspace_bytes(call(nullptr, in, nullptr, rows, threads, from, to));
  }
  int64_t workspace(int64_t rows, int threads) const { return workspace(rows, threads, Type::f32, Type::f32); }
};

inline std::vector<Product>& products() {
  static auto& all = *new std::vector<Product>;  // never destroyed: a thread may be at work while the process ends
  return all;
}

// Adds the rows of a family; Python reads `products`, their names in order.
template <class Row>
void add_products(nb::module_& m, const Row* rows, size_t count,
                  void (*require)(const RowBase&, const PackedWeight&),
                  bool (*whole_rows)(const RowBase&) = [](const RowBase&) { return false; }) {
  nb::list names;
  for (size_t i = 0; i < count; i++) {
    products().push_back({&rows[i], rows[i].workspace_bytes, rows[i].run, require, cpu_has(rows[i].isa), whole_rows(rows[i])});
    names.append(rows[i].name);
  }
  append_to(m, "products", names);
}

// The product at that place of `products`, whose instructions this CPU has.
inline const Product& product_at(int index) {
  if (index < 0 || static_cast<size_t>(index) >= products().size()) throw std::out_of_range("no such product");
  const Product& found = products()[static_cast<size_t>(index)];
  if (!found.runs) no_such_instructions(found.row->name, found.row->isa);
  return found;
}

// An argument that is such a place, -1 for none where the call says so.
struct ProductAt : NumberArgument {
  static std::string name(int place) { return products().at(static_cast<size_t>(place)).row->name; }
  static int find(const std::string& name) {
    for (size_t i = 0; i < products().size(); i++)
      if (name == products()[i].row->name) return product_at(static_cast<int>(i)), static_cast<int>(i);
    no_such_kernel(name);
  }
};
template <>
struct Argument<ProductAt> : NamedArgument<ProductAt, ProductAt> {};

// A product inside, its weight held against the row that reads it.
inline Part part_of(const Border& border, int product, const Operand& weight, const char* role, const Numbers& bias,
                    int64_t out, int64_t in) {
  const Product& found = product_at(product);
  const PackedWeight packed(border, weight, role);
  const RowBase& row = *found.row;
  if (!packed.made_for(row.dtype, row.layout, out, in))  // a text is made only for who is refused
    border.refuse(weight, role, std::string("layout '") + row.layout + "' of a " + row.dtype + " weight (" +
                                    std::to_string(out) + ", " + std::to_string(in) + ")");
  found.require(row, packed);
  return {&found, packed.bytes(), bias.data(), out, in, packed.group(), packed.zeros()};
}

}  // namespace twofour
