// Operands of attention at the border: four axes, masks that repeat, answers without a number that stands twice.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention.h"
#include "native/operand.h"

namespace twofour {

// An operand as (batch, heads, rows, width).
struct Heads {
  char* data;
  Strides strides;
  int64_t batch, heads, rows, width;
};

// Whether the last axis is contiguous: strides of what holds nothing say nothing.
inline bool along_rows(const View& v) { return v.shape[v.ndim - 1] <= 1 || v.strides[v.ndim - 1] == 1 || v.count() == 0; }

// A tensor of four axes, the last one contiguous.
inline Heads heads(const Border& border, const Operand& operand, const char* role, Types types) {
  const View v = border.strided(operand, role, types);
  border.require(v.ndim == 4 && along_rows(v), operand, role,
                 types.text() + " (batch, heads, rows, width) on cpu, its last axis contiguous");
  return {v.data, {v.strides[0], v.strides[1], v.strides[2]}, v.shape[0], v.shape[1], v.shape[2], v.shape[3]};
}

// What a row reads; those of int8 make bytes of bfloat16.
inline Types types_of(const RowBase& kernel) {
  return std::strcmp(kernel.dtype, "float32") == 0 ? Types{Type::f32} : Types{Type::bf16};
}

// The mask over (batch or windows, heads, queries, keys), its repeated axes with strides of 0; None hides nothing.
inline void add_mask(const Border& border, const Operand& mask, Attention* args) {
  if (!mask.given()) return;
  const View v = border.strided(mask, "mask", {Type::f32, Type::boolean});
  const int64_t wanted[] = {args->mask_batch(), args->heads, args->queries, args->keys};
  border.require(v.ndim == 4 && std::equal(wanted, wanted + 4, v.shape) && along_rows(v), mask,
                 "mask", "(batch, heads, queries, keys), keys contiguous");
  args->mask = v.data;
  args->mask_kind = v.type == Type::boolean ? AttentionMask::keep : AttentionMask::add;
  args->mask_strides = {v.strides[0], v.strides[1], v.strides[2]};
}

// Whether no number of a tensor that is written stands twice in memory, as those of an expanded one do.
inline bool is_apart(const Heads& out) {
  if (out.batch == 0 || out.heads == 0 || out.rows == 0) return true;
  std::array<std::pair<int64_t, int64_t>, 3> axes{
      {{out.strides.batch, out.batch}, {out.strides.head, out.heads}, {out.strides.row, out.rows}}};
  std::sort(axes.begin(), axes.end());
  int64_t extent = out.width;
  for (const auto& [stride, size] : axes) {
    if (size == 1) continue;
    if (stride < extent) return false;
    extent += stride * (size - 1);
  }
  return true;
}

// Which weights go: `below` of 65536 numbers, by a seed of 32 bits.
inline void add_dropout(const Border& border, const Operand& operand, int64_t below, int64_t seed, Attention* args) {
  border.require(0 <= below && below < 65536 && 0 <= seed && seed <= UINT32_MAX, operand, "dropout",
                 "a share of 65536 below it, and a seed of 32 bits");
  args->drop_below = static_cast<uint32_t>(below), args->drop_seed = static_cast<uint32_t>(seed);
}

}  // namespace twofour
