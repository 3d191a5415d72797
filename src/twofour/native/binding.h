// What the bind.cc files share: the border for operands, and rows of a table by index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "operand.h"
#include "python.h"
#include "table.h"

namespace twofour {

// The table of a type of rows, since each table has a type of its own.
template <class Row>
struct TableOf {
  static inline const Row* rows = nullptr;
  static inline size_t count = 0;

  static std::string name(int place) { return static_cast<size_t>(place) < count ? rows[place].name : ""; }
  static int find(const std::string& name) {
    for (size_t i = 0; i < count; i++)
      if (name == rows[i].name) return cpu_has(rows[i].isa) ? static_cast<int>(i) : (no_such_instructions(rows[i].name, rows[i].isa), -1);
    no_such_kernel(name);
  }
};

// An argument that is the index of such a row, -1 for none where the call says so.
template <class Row>
struct RowOf : NumberArgument {};
template <class Row>
struct Argument<RowOf<Row>> : NamedArgument<RowOf<Row>, TableOf<Row>> {};

// Adds rows to the table that Python reads: what they say, as tuples; a row's index is its place among its operation's.
template <class Row>
void bind_table(nb::module_& m, const Row* rows, size_t count) {
  TableOf<Row>::rows = rows, TableOf<Row>::count = count;
  nb::list table;
  for (size_t i = 0; i < count; i++) {
    const RowBase& row = rows[i];
    table.append(nb::make_tuple(row.name, row.operation, row.isa, row.pattern, row.dtype, row.layout, row.least, row.most));
  }
  append_to(m, "table", table);
}
template <class Row, size_t kCount>
void bind_table(nb::module_& m, const Row (&rows)[kCount]) {
  bind_table(m, rows, kCount);
}

// The row of that index, whose instructions this CPU has. Each table has a type of rows of its own: what the CPU can run
// is remembered by type.
template <class Row>
const Row& row(const Row* rows, size_t count, int index) {
  if (index < 0 || static_cast<size_t>(index) >= count) throw std::out_of_range("no such kernel row");
  static const Row* const table = rows;
  if (rows != table) throw std::logic_error("two tables have one type of rows");
  static const auto& runs = *[&] {  // once: asking the CPU takes longer than a small product; kept, as bound_calls() are
    auto* const found = new std::vector<bool>;
    for (size_t i = 0; i < count; i++) found->push_back(cpu_has(rows[i].isa));
    return found;
  }();
  if (!runs[static_cast<size_t>(index)]) no_such_instructions(rows[index].name, rows[index].isa);
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
void bind_nm_mask(nb::module_& m);
void bind_nm_stripes(nb::module_& m);
void bind_column_sums(nb::module_& m);
void bind_nm_compress(nb::module_& m);
void bind_nm_unbiased(nb::module_& m);
void bind_nm_sddmm(nb::module_& m);
void bind_nm_gradient(nb::module_& m);
void bind_nm_conv_gradient(nb::module_& m);
void bind_nm_matmul(nb::module_& m);
void bind_hybrid_matmul(nb::module_& m);
void bind_block_matmul(nb::module_& m);
void bind_bits_matmul(nb::module_& m);
void bind_bits_conv(nb::module_& m);
void bind_dense_matmul(nb::module_& m);
void bind_nm_conv(nb::module_& m);
void bind_depthwise_conv(nb::module_& m);
void bind_squeeze_excite(nb::module_& m);
void bind_dense_conv(nb::module_& m);
void bind_conv_chain(nb::module_& m);
void bind_window_conv(nb::module_& m);
void bind_fused_matmul(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_activation(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_attention_gradient(nb::module_& m);
void bind_ragged(nb::module_& m);
void bind_norm(nb::module_& m);
void bind_rotation(nb::module_& m);
void bind_fused_block(nb::module_& m);
void bind_copy(nb::module_& m);
void bind_executor(nb::module_& m);
void bind_held(nb::module_& m);
void bind_mapped(nb::module_& m);

// Lets the border read tensors, and its refusals become errors of Python.
void read_tensors();

}  // namespace twofour
