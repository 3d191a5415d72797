// Every native product with a prepared weight, whatever its family: what an operation asks that runs products inside. A
// family adds its rows where it is bound; nothing is known of them here but what the tables say.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layouts/packed_weight.h"
#include "matmul.h"
#include "native/binding.h"

namespace twofour {

struct Product {
  const RowBase* row;
  int64_t (*workspace_bytes)(const Matmul&);
  void (*run)(const Matmul&);
  // Holds the bytes of a weight, whose header is of this row, against the sizes that the header says.
  void (*require)(const RowBase& row, const PackedWeight& weight);
  bool runs;  // whether this CPU has its instructions: asking takes longer than a small product
};

inline std::vector<Product>& products() {
  static std::vector<Product> all;
  return all;
}

// Adds the rows of a family; Python reads `products`, their names in order.
template <class Row>
void add_products(nanobind::module_& m, const Row* rows, size_t count,
                  void (*require)(const RowBase&, const PackedWeight&)) {
  if (!nanobind::hasattr(m, "products")) m.attr("products") = nanobind::list();
  auto names = nanobind::cast<nanobind::list>(m.attr("products"));
  for (size_t i = 0; i < count; i++) {
    products().push_back({&rows[i], rows[i].workspace_bytes, rows[i].run, require, cpu_has(rows[i].isa)});
    names.append(rows[i].name);
  }
}

// The product at that place of `products`, whose instructions this CPU has.
inline const Product& product_at(int index) {
  if (index < 0 || static_cast<size_t>(index) >= products().size()) throw nanobind::index_error("no such product");
  const Product& found = products()[static_cast<size_t>(index)];
  if (!found.runs)
    throw Refusal{std::string(found.row->name) + " cannot run on this CPU", "a CPU without " + std::string(found.row->isa),
                  "one that has it", "choose a row that native.supports"};
  return found;
}

}  // namespace twofour
