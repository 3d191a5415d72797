// out = softmax(scale * Q K^T + mask) V in float32, bfloat16 or whole numbers, every batch entry and head: the call, and its kernels.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

// Where an operand's (batch, head, row) begins, in elements; the last axis is contiguous.
struct Strides {
  int64_t batch, head, row;
  int64_t at(int64_t b, int64_t h) const { return b * batch + h * head; }
};

// Keys of a row that computes in whole numbers: 255 * 128 times as many fit int32.
constexpr int64_t kMostByteKeys = 65536;

enum class AttentionMask { none, add, keep };  // add: float32, added to the scores; keep: bytes, 0 hides the key

// Rows of one head. `order`, where it is given, says where in memory each of them stands.
template <class E>
struct HeadRows {
  E* begin;
  int64_t stride;
  const int64_t* order;
  E* at(int64_t row) const { return begin + (order == nullptr ? row : order[row]) * stride; }
};

// Keys or values in one or two places: a cache and what is new behind it. `first` is how many rows stand in the cache.
template <class E>
struct Parts {
  HeadRows<const E> cache, added;
  int64_t first;
  const E* at(int64_t row) const { return row < first ? cache.at(row) : added.at(row - first); }
};

// One call. q (batch, heads, queries, width), k (batch, key_heads, keys, width), v (batch, key_heads, keys,
// value_width), out (batch, heads, queries, value_width). `heads` is a multiple of `key_heads`: neighbours share keys.
// `mask` covers (batch, heads, queries, keys), strides of 0 repeat it. `causal` hides key j from query i where j > i.
// Keys and values from `first_keys` on stand in k_added and v_added (batch, key_heads, keys - first_keys, ..).
// A query that sees no key answers `unseen`. q, k, v and out are of the kernel's type, float32 or bfloat16, which rows of
// int8 read and answer too; keys are kMostByteKeys at most there.
struct Attention {
  const void *q, *k, *v;
  void* out;
  Strides q_strides, k_strides, v_strides, out_strides;
  const void* mask;
  AttentionMask mask_kind;
  Strides mask_strides;
  int64_t batch, heads, key_heads, queries, keys, width, value_width;
  float scale;
  bool causal;
  float unseen;  // 0, as in torch's attention, or NaN, as where a softmax is written out
  const void *k_added, *v_added;
  Strides k_added_strides, v_added_strides;
  int64_t first_keys;  // `keys` where all stand in k and v
  // Where rows of an image stand in windows of `queries` rows each: `windows` batch entries are one image, `order`
  // (windows, queries) says which of its rows each has, in q, k, v and out alike, whose batch strides are those of images.
  // The mask is that of the windows. Null elsewhere, and `windows` 1.
  const int64_t* order = nullptr;
  int64_t windows = 1;
  // Whether out holds bytes in place of the kernel's type: round(answer / bytes_scale) + bytes_zero within 0 ... 255.
  bool bytes = false;
  float bytes_scale = 1.0f;
  int32_t bytes_zero = 0;
  // Dropout: weights whose 16 random bits are below `drop_below` go, the others count `kept_factor()` times. The bits follow
  // from `drop_seed` and the weight's place (dropout.h). Rows of int8 drop nothing.
  uint32_t drop_below = 0, drop_seed = 0;
  float kept_factor() const { return 65536.0f / static_cast<float>(65536 - drop_below); }
  // Of rows of int8 whose operands are bytes already, 128 standing for 0: of each head, what a unit of its scores is in units
  // of ln 2; of each column of the values, its step and what 0 stands for. `scale` counts for nothing then. Null elsewhere.
  const float *units = nullptr, *value_steps = nullptr, *value_middles = nullptr;

  template <class E>
  HeadRows<E> rows_of(E* data, const Strides& s, int64_t b, int64_t h) const {
    return {data + s.at(b / windows, h), s.row, order == nullptr ? nullptr : order + b % windows * queries};
  }
  template <class E>
  HeadRows<const E> query_rows(int64_t b, int64_t h) const {
    return rows_of(static_cast<const E*>(q), q_strides, b, h);
  }
  template <class E>
  HeadRows<E> answer_rows(int64_t b, int64_t h) const {
    return rows_of(static_cast<E*>(out), out_strides, b, h);
  }
  // Batch entries of the mask, and where it begins for one row.
  int64_t mask_batch() const { return order == nullptr ? batch : windows; }
  int64_t mask_at(int64_t b, int64_t h, int64_t row) const {
    return mask_strides.at(b % mask_batch(), h) + row * mask_strides.row;
  }
  template <class E>
  Parts<E> key_rows(int64_t b, int64_t h) const {
    return parts<E>(k, k_strides, k_added, k_added_strides, b, h);
  }
  template <class E>
  Parts<E> value_rows(int64_t b, int64_t h) const {
    return parts<E>(v, v_strides, v_added, v_added_strides, b, h);
  }

 private:
  template <class E>
  Parts<E> parts(const void* cache, const Strides& s, const void* added, const Strides& t, int64_t b, int64_t h) const {
    const E* behind = added == nullptr ? nullptr : static_cast<const E*>(added) + t.at(b, h);
    return {rows_of(static_cast<const E*>(cache), s, b, h), {behind, t.row, nullptr}, first_keys};
  }
};

// One row of the table. `run` computes items [begin, end) of batch * heads; `workspace` is 64-byte aligned, of
// workspace_bytes(args) bytes, and may hold garbage: calls with workspaces of their own may run at once.
struct AttentionKernel : RowBase {
  int64_t (*workspace_bytes)(const Attention&);
  void (*run)(const Attention&, int64_t begin, int64_t end, void* workspace);
};

#define TWOFOUR_ROW(symbol, ...)                      \
  int64_t symbol##__workspace(const Attention& args); \
  void symbol(const Attention& args, int64_t begin, int64_t end, void* workspace);
#include "attention.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
