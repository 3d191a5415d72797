// Attention for Python: the rows and the calls.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "heads.h"
#include "native/binding.h"
#include "run.h"

namespace twofour {
namespace {

constexpr AttentionKernel kKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "attention", __VA_ARGS__}, symbol##__workspace, symbol},
#include "attention.inc"
#undef TWOFOUR_ROW
};

// Columns [begin, begin + size) of a tensor (batch, rows, columns), as heads of `width` side by side.
Heads heads_of_columns(const Border& border, const Operand& operand, const char* role, Types types, int64_t begin,
                       int64_t size, int64_t width) {
  const View v = border.strided(operand, role, types);
  border.require(v.ndim == 3 && along_rows(v) && width > 0 && begin >= 0 && size >= 0 && size % width == 0 &&
                     size <= v.shape[2] && begin <= v.shape[2] - size,
                 operand, role, types.text() + " (batch, rows, columns) on cpu, columns contiguous, heads inside");
  return {v.data + begin * v.width, {v.strides[0], width, v.strides[1]}, v.shape[0], size / width, v.shape[1], width};
}

// Refuses keys, or widths of one, of which a row of int8 could not add the products.
void require_keys(const Border& border, const AttentionKernel& kernel, const Operand& keys, const Attention& args) {
  border.require(std::strcmp(kernel.dtype, "int8") != 0 || (args.keys <= kMostByteKeys && args.width <= kMostByteKeys),
                 keys, "keys", "65536 of them at most, and as many columns of a head");
}

// The answer's type: bytes where it is asked for them by a scale other than 0, else the kernel's.
Types answers_of(const AttentionKernel& kernel, float bytes_scale) {
  return bytes_scale != 0.0f ? Types{Type::u8} : types_of(kernel);
}
void add_bytes(const Border& border, const Answer& out, float scale, int zero, Attention* args) {
  if (scale == 0.0f) return;
  border.require(0 <= zero && zero <= 255, out, "answer", "a zero point from 0 to 255");
  args->bytes = true, args->bytes_scale = scale, args->bytes_zero = zero;
}

// The call, but for its mask and what stands behind k and v.
Attention call_of(const Border& border, const Heads& q, const Heads& k, const Heads& v, const Heads& out,
                  const Operand& answer, float scale, bool causal, float unseen) {
  border.require(q.batch == k.batch && q.batch == v.batch && q.batch == out.batch && q.heads == out.heads &&
                     q.rows == out.rows && v.width == out.width && q.width == k.width && k.heads == v.heads &&
                     k.rows == v.rows && k.heads > 0 && q.heads % k.heads == 0 && q.width > 0,
                 answer, "answer", "(batch, heads, queries, value width) of q, k and v that belong together");
  border.require(is_apart(out), answer, "answer", "numbers that each have a place of their own in memory");
  return {q.data, k.data, v.data, out.data, q.strides, k.strides, v.strides, out.strides,
          nullptr, AttentionMask::none, {}, q.batch, q.heads, k.heads, q.rows, k.rows, q.width, v.width,
          scale, causal, unseen, nullptr, nullptr, {}, {}, k.rows};
}

// The call for rows [begin, end) of all that stand one behind the other, numbers of `width` bytes in q, k and v, `answer` in out.
Attention sequence_of(const Attention& all, int64_t begin, int64_t end, int64_t width, int64_t answer) {
  Attention one = all;
  const auto from = [&](const void* data, const Strides& s) { return static_cast<const char*>(data) + begin * s.row * width; };
  one.q = from(all.q, all.q_strides), one.k = from(all.k, all.k_strides), one.v = from(all.v, all.v_strides);
  one.out = static_cast<char*>(all.out) + begin * all.out_strides.row * answer;
  one.queries = one.keys = one.first_keys = end - begin;
  return one;
}

// Attention inside each of `count` sequences of the rows of one batch entry. The members of a team take one key head of one
// sequence after the other: sequences differ in length.
void run_sequences(const AttentionKernel& kernel, const Attention& all, const int64_t* offsets, int64_t count,
                   int64_t width, int threads) {
  static Scratch scratch;
  if (all.queries == 0 || all.value_width == 0) return;
  const Unlocked unlocked;
  const int64_t group = all.heads / all.key_heads, items = count * all.key_heads;
  const int64_t answer = all.bytes ? 1 : all.units != nullptr ? 2 : width;
  const int64_t members = std::max<int64_t>(1, std::min<int64_t>(items, threads));
  int64_t each = 0;
  for (int64_t i = 0; i < count; ++i)
    each = std::max(each, round_up(kernel.workspace_bytes(sequence_of(all, offsets[i], offsets[i + 1], width, answer)), 64));
  const Scratch::Lease lease(scratch, workspace_of(each, members));
  std::atomic<int64_t> next{0};
  parallel_for(members, 1, static_cast<int>(members), [&](int64_t begin, int64_t end) {
    for (int64_t member = begin; member < end; ++member)
      for (int64_t item; (item = next.fetch_add(1)) < items;) {
        const int64_t at = item / all.key_heads, head = item % all.key_heads * group;
        const Attention one = sequence_of(all, offsets[at], offsets[at + 1], width, answer);
        if (one.queries > 0) kernel.run(one, head, head + group, static_cast<char*>(lease.data()) + each * member);
      }
  });
}

// Whether numbers rise from 0 to `rows`.
bool are_offsets(const int64_t* numbers, int64_t count, int64_t rows) {
  return count > 1 && numbers[0] == 0 && numbers[count - 1] == rows && std::is_sorted(numbers, numbers + count);
}

// The same of offsets, int64 (sequences + 1,), that are checked; operands have `width` bytes a number.
void run_sequences(const Border& border, const AttentionKernel& kernel, const Attention& args, const Operand& offsets,
                   int64_t width, int threads) {
  const View ends = border.dense(offsets, "offsets", {Type::s64});
  const auto* const places = reinterpret_cast<const int64_t*>(ends.data);
  border.require(args.batch == 1 && args.keys == args.queries && ends.ndim == 1 &&
                     are_offsets(places, ends.count(), args.queries),
                 offsets, "offsets", "int64 (sequences + 1,) that rise from 0 to the rows of one batch entry");
  run_sequences(kernel, args, places, ends.count() - 1, width, threads);
}

// Whether so many numbers name each of as many rows once.
bool names_each_once(const int64_t* places, int64_t rows) {
  std::vector<bool> named(static_cast<size_t>(rows));
  return std::all_of(places, places + rows, [&](int64_t p) {
    if (p < 0 || p >= rows || named[p]) return false;
    named[p] = true;
    return true;
  });
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_table(m, kKernels);
  // Tensors of four axes, as in attention.h; `out` (batch, heads, queries, value width), any strides but the last; of bytes
  // where `bytes_scale` is not 0.
  bind_call(m, "attention", +[](RowOf<AttentionKernel> index, const Operand& q, const Operand& k, const Operand& v, const Answer& out,
                        const Operand& mask, const Operand& k_added, const Operand& v_added, float scale, bool causal,
                        float unseen, float bytes_scale, int bytes_zero, Threads threads) {
    const AttentionKernel& kernel = row(kKernels, index);
    const Border border(kernel.name);
    const Types types = types_of(kernel);
    const Heads keys = heads(border, k, "keys", types), values = heads(border, v, "values", types);
    Attention args = call_of(border, heads(border, q, "queries", types), keys, values,
                             heads(border, out, "answer", answers_of(kernel, bytes_scale)), out, scale, causal, unseen);
    add_bytes(border, out, bytes_scale, bytes_zero, &args);
    if (k_added.given() || v_added.given()) {
      const Heads more = heads(border, k_added, "added keys", types), beside = heads(border, v_added, "added values", types);
      border.require(more.batch == keys.batch && more.heads == keys.heads && more.width == keys.width &&
                         beside.batch == keys.batch && beside.heads == keys.heads && beside.width == values.width &&
                         beside.rows == more.rows,
                     k_added, "added keys", "as the keys and values but for their number, which both share");
      args.keys += more.rows;
      args.k_added = more.data, args.v_added = beside.data;
      args.k_added_strides = more.strides, args.v_added_strides = beside.strides;
    }
    require_keys(border, kernel, k, args);
    add_mask(border, mask, &args);
    run_attention(kernel, args, threads);
  });
  // q, k, v: (batch, rows, columns) and the columns of their heads, `width` each: begins and sizes of q, k and v; `out`
  // (batch, queries, columns of q), contiguous.
  bind_call(m, "attention_of_columns", +[](RowOf<AttentionKernel> index, const Operand& q, const Operand& k, const Operand& v, const Answer& out,
                                   const Operand& mask, std::array<int64_t, 3> begins, std::array<int64_t, 3> sizes,
                                   int64_t width, float scale, bool causal, float unseen, float bytes_scale, int bytes_zero,
                                   Threads threads) {
    const AttentionKernel& kernel = row(kKernels, index);
    const Border border(kernel.name);
    const Types types = types_of(kernel);
    const auto part = [&](const Operand& operand, const char* role, int i) {
      return heads_of_columns(border, operand, role, types, begins[i], sizes[i], width);
    };
    Attention args = call_of(border, part(q, "queries", 0), part(k, "keys", 1), part(v, "values", 2),
                             heads_of_columns(border, out, "answer", answers_of(kernel, bytes_scale), 0, sizes[0], width), out,
                             scale, causal, unseen);
    require_keys(border, kernel, k, args);
    add_bytes(border, out, bytes_scale, bytes_zero, &args);
    add_mask(border, mask, &args);
    run_attention(kernel, args, threads);
  });
  // As attention_of_columns of one batch entry whose rows are several sequences, one behind the other: `offsets`, int64
  // (sequences + 1,), says where each begins, and last where all end. A query sees the keys of its own.
  bind_call(m, "attention_of_sequences", +[](RowOf<AttentionKernel> index, const Operand& q, const Operand& k, const Operand& v,
                                   const Answer& out, const Operand& offsets, std::array<int64_t, 3> begins,
                                   std::array<int64_t, 3> sizes, int64_t width, float scale, bool causal, float bytes_scale,
                                   int bytes_zero, Threads threads) {
    const AttentionKernel& kernel = row(kKernels, index);
    const Border border(kernel.name);
    const Types types = types_of(kernel);
    const auto part = [&](const Operand& operand, const char* role, int i) {
      return heads_of_columns(border, operand, role, types, begins[i], sizes[i], width);
    };
    Attention args = call_of(border, part(q, "queries", 0), part(k, "keys", 1), part(v, "values", 2),
                             heads_of_columns(border, out, "answer", answers_of(kernel, bytes_scale), 0, sizes[0], width), out,
                             scale, causal, 0.0f);
    require_keys(border, kernel, k, args);
    add_bytes(border, out, bytes_scale, bytes_zero, &args);
    run_sequences(border, kernel, args, offsets, types.has(Type::bf16) ? 2 : 4, threads);
  });
  // As attention_of_columns, or where offsets are given as attention_of_sequences, of uint8 columns, 128 standing for 0: `steps`,
  // float32 (heads + 2 * columns of the values), has the units of heads' scores, then steps and middles of the values.
  bind_call(m, "attention_of_bytes", +[](RowOf<AttentionKernel> index, const Operand& q, const Operand& k, const Operand& v,
                               const Answer& out, const Operand& steps, const Operand& mask, const Operand& offsets,
                               std::array<int64_t, 3> begins, std::array<int64_t, 3> sizes, int64_t width, bool causal,
                               float unseen, float bytes_scale, int bytes_zero, Threads threads) {
    const AttentionKernel& kernel = row(kKernels, index);
    const Border border(kernel.name);
    border.require(std::strcmp(kernel.dtype, "int8") == 0, q, "queries", "a row of int8 for bytes");
    const auto part = [&](const Operand& operand, const char* role, int i) {
      return heads_of_columns(border, operand, role, {Type::u8}, begins[i], sizes[i], width);
    };
    Attention args = call_of(border, part(q, "queries", 0), part(k, "keys", 1), part(v, "values", 2),
                             heads_of_columns(border, out, "answer", answers_of(kernel, bytes_scale), 0, sizes[0], width), out,
                             1.0f, causal, unseen);
    require_keys(border, kernel, k, args);
    add_bytes(border, out, bytes_scale, bytes_zero, &args);
    const Numbers numbers = border.numbers(steps, "steps", args.heads + 2 * sizes[2]);
    border.require(steps.given(), steps, "steps", "the units of heads, and the steps and middles of values");
    args.units = numbers.data(), args.value_steps = args.units + args.heads, args.value_middles = args.value_steps + sizes[2];
    if (!offsets.given()) {
      add_mask(border, mask, &args);
      return run_attention(kernel, args, threads);
    }
    border.require(!mask.given(), mask, "mask", "none for sequences");
    run_sequences(border, kernel, args, offsets, 1, threads);
  });
  // q, k, v: (images, rows, columns), all columns in heads of `width`; `out` as q. `order` (windows, rows of one), int64,
  // says which rows of an image are a window, each row in one of them; `mask` is over (windows, heads, rows, rows).
  bind_call(m, "attention_of_windows", +[](RowOf<AttentionKernel> index, const Operand& q, const Operand& k, const Operand& v, const Answer& out,
                                   const Operand& mask, const Operand& order, int64_t width, float scale, float unseen,
                                   Threads threads) {
    const AttentionKernel& kernel = row(kKernels, index);
    const Border border(kernel.name);
    const Types types = types_of(kernel);
    const auto all = [&](const Operand& operand, const char* role) {
      const View v = border.strided(operand, role, types);
      return heads_of_columns(border, operand, role, types, 0, v.ndim == 3 ? v.shape[2] : 0, width);
    };
    Attention args = call_of(border, all(q, "queries"), all(k, "keys"), all(v, "values"), all(out, "answer"), out, scale,
                             false, unseen);
    require_keys(border, kernel, k, args);
    const View rows = border.dense(order, "order", {Type::s64});
    const auto* places = reinterpret_cast<const int64_t*>(rows.data);
    border.require(rows.ndim == 2 && rows.count() == args.queries && args.keys == args.queries &&
                       names_each_once(places, args.queries),
                   order, "order", "(windows, rows of one) int64, each row of an image once");
    if (rows.count() == 0) return;
    args.order = places, args.windows = rows.shape[0], args.batch *= rows.shape[0];
    args.queries = args.keys = args.first_keys = rows.shape[1];
    add_mask(border, mask, &args);
    run_attention(kernel, args, threads);
  });
  // Attention of a training step, rows of "attention" but for those of int8: weights are dropped.
  m.def("attention_dropped", [](int index, const Operand& q, const Operand& k, const Operand& v, const Operand& out,
                                const Operand& mask, float scale, bool causal, int64_t drop_below, int64_t drop_seed,
                                int threads) {
    const AttentionKernel& kernel = row(kKernels, index);
    const Border border(kernel.name);
    const Types types = types_of(kernel);
    border.require(std::strcmp(kernel.dtype, "int8") != 0, q, "queries", "a row of float32 or bfloat16");
    const Heads queries = heads(border, q, "queries", types), keys = heads(border, k, "keys", types);
    const Heads values = heads(border, v, "values", types);
    Attention args = call_of(border, queries, keys, values, heads(border, out, "answer", types), out, scale, causal, 0.0f);
    add_dropout(border, q, drop_below, drop_seed, &args);
    add_mask(border, mask, &args);
    run_attention(kernel, args, threads);
  });
}

}  // namespace twofour
