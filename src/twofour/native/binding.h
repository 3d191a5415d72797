// What the bind.cc files share: raw pointers from Python's integers, and rows of a table by index.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace twofour {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class Row, size_t kCount>
const Row& row(const Row (&rows)[kCount], int index) {
  if (index < 0 || index >= static_cast<int>(kCount)) throw nanobind::index_error("no such kernel row");
  return rows[index];
}

// One function per operation, beside its kernels; bindings.cc calls them all.
void bind_nm_mask(nanobind::module_& m);
void bind_nm_stripes(nanobind::module_& m);
void bind_nm_compress(nanobind::module_& m);
void bind_nm_unbiased(nanobind::module_& m);
void bind_nm_gradient(nanobind::module_& m);
void bind_nm_matmul(nanobind::module_& m);
void bind_dense_matmul(nanobind::module_& m);
void bind_nm_conv(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_norm(nanobind::module_& m);

}  // namespace twofour
