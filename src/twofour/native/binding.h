// What the bind.cc files share: the border for operands, and rows of a table by index.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "isa.h"
#include "operand.h"
#include "recording.h"
#include "table.h"

namespace twofour {

// Adds rows to the table that Python reads: what they say, as tuples; a row's index is its place among its operation's.
template <class Row>
void bind_table(nanobind::module_& m, const Row* rows, size_t count) {
  if (!nanobind::hasattr(m, "table")) m.attr("table") = nanobind::list();
  auto table = nanobind::cast<nanobind::list>(m.attr("table"));
  for (size_t i = 0; i < count; i++) {
    const RowBase& row = rows[i];
    table.append(nanobind::make_tuple(row.name, row.operation, row.isa, row.pattern, row.dtype, row.layout, row.least,
                                      row.most));
  }
}
template <class Row, size_t kCount>
void bind_table(nanobind::module_& m, const Row (&rows)[kCount]) {
  bind_table(m, rows, kCount);
}

// The row of that index, whose instructions this CPU has. Each table has a type of rows of its own: what the CPU can run
// is remembered by type.
template <class Row>
const Row& row(const Row* rows, size_t count, int index) {
  if (index < 0 || static_cast<size_t>(index) >= count) throw nanobind::index_error("no such kernel row");
  static const Row* const table = rows;
  if (rows != table) throw std::logic_error("two tables have one type of rows");
  static const std::vector<bool> runs = [&] {  // once: asking the CPU takes longer than a small product
    std::vector<bool> found;
    for (size_t i = 0; i < count; i++) found.push_back(cpu_has(rows[i].isa));
    return found;
  }();
  if (!runs[static_cast<size_t>(index)])
    throw Refusal{std::string(rows[index].name) + " cannot run on this CPU", "a CPU without " + std::string(rows[index].isa),
                  "one that has it", "choose a row that native.supports"};
  return rows[index];
}
template <class Row, size_t kCount>
const Row& row(const Row (&rows)[kCount], int index) {
  return row(rows, kCount, index);
}

// Whether a * b * c, all at least 0, is `count`.
inline bool product_is(int64_t count, int64_t a, int64_t b, int64_t c) {
  int64_t all;
  return a >= 0 && b >= 0 && c >= 0 && !__builtin_mul_overflow(a, b, &all) && !__builtin_mul_overflow(all, c, &all) &&
         all == count;
}

// One function per operation, beside its kernels; bindings.cc calls them all.
void bind_nm_mask(nanobind::module_& m);
void bind_nm_stripes(nanobind::module_& m);
void bind_nm_compress(nanobind::module_& m);
void bind_nm_unbiased(nanobind::module_& m);
void bind_nm_gradient(nanobind::module_& m);
void bind_nm_matmul(nanobind::module_& m);
void bind_block_matmul(nanobind::module_& m);
void bind_bits_matmul(nanobind::module_& m);
void bind_bits_conv(nanobind::module_& m);
void bind_dense_matmul(nanobind::module_& m);
void bind_nm_conv(nanobind::module_& m);
void bind_depthwise_conv(nanobind::module_& m);
void bind_squeeze_excite(nanobind::module_& m);
void bind_dense_conv(nanobind::module_& m);
void bind_conv_chain(nanobind::module_& m);
void bind_fused_matmul(nanobind::module_& m);
void bind_recurrent(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_norm(nanobind::module_& m);
void bind_fused_block(nanobind::module_& m);
void bind_executor(nanobind::module_& m);

}  // namespace twofour
