// The dense products of bfloat16 and of whole numbers: weights in panels of 32 outputs, a dword of each (two bfloat16, or four
// bytes) side by side; tokens in blocks of dwords whose sums stay in registers.
//
//     weight (out, in), bytes              panels: a row of 32 dwords per four inputs
//        k0 k1 k2 k3 | k4 ..                  m0         m1         ..  m31
//     m0  a  b  c  d | ..       prepare    k0  a b c d    e f g h   ..
//     m1  e  f  g  h | ..       ------->   k4  ..
//
// As ../f32/panels.h, but for the inputs, which are summed in one pass: sums of whole numbers are exact, and a panel of
// 4,096 inputs takes 128 or 256 KB. Weights of whole numbers have the scale and the sum of each row before the panels. One
// token has sums of its own for inputs in a row, so that they do not wait for each other, and reads the weight as one stream.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/dense_matmul/ahead.h"
#include "kernels/dense_matmul/dense_matmul.h"
#include "kernels/dense_matmul/turned.h"
#include "kernels/byte_windows.h"
#include "kernels/dword_dots.h"
#include "native/compiler.h"
#include "native/integers.h"
#include "native/team.h"

namespace {

using twofour::kDensePanel;

constexpr int64_t kDwordChunk = 512 << 10;  // bytes of packed tokens beside a panel in an L2 of 1 MB

// A weight behind its header, and how a call is cut.
template <class D>
struct DwordPanels {
  using V = typename D::V;
  static constexpr int vectors = 2, wide = vectors * V::width, each = kDensePanel / V::width;
  // Tokens of a block: registers for their sums, and where dots of bytes are no instruction for products.
  static constexpr int most = V::width == 16 ? 14 : V::width < 8 ? 4 : D::per == 4 && kDotsAreInstructions ? 6 : 5;
  int64_t dwords, panels, row_bytes, blocks, chunk, kept_bytes, rows_bytes;
  WholeRows rows;
  const float* weight;

  explicit DwordPanels(const Matmul& a)
      : dwords(ceil_div(a.in_features, D::per)),
        panels(ceil_div(a.out_features, kDensePanel)),
        row_bytes(round_up(dwords * 4, 64)),
        blocks(ceil_div(a.tokens > 0 ? a.tokens : 1, most)),
        kept_bytes(round_up(a.tokens * static_cast<int64_t>(sizeof(typename D::Token)), 64)),
        rows_bytes(a.tokens > 1 ? V::width * row_bytes : 0) {
    chunk = ceil_div(blocks, least(blocks, ceil_div(blocks * block_bytes(), kDwordChunk)));  // chunks of one size
    const auto* data = static_cast<const float*>(a.weight);
    const int64_t head = D::per == 4 ? panels * kDensePanel : 0;
    rows = {data, reinterpret_cast<const int32_t*>(data + head)};
    weight = data + 2 * head;
  }
  int64_t block_bytes() const { return most * row_bytes; }
  int64_t bytes(int threads) const {
    return kept_bytes + (threads > 1 ? threads : 1) * rows_bytes + chunk * block_bytes();
  }
  // First token of a block: all blocks are of one size or one less.
  int64_t first(const Matmul& a, int64_t block) const { return a.tokens * block / blocks; }
  const float* panel(int64_t index) const { return weight + index * dwords * kDensePanel; }
};

template <class D>
using ImagesOf = std::conditional_t<D::per == 4, ByteImages<typename D::V>, NoImages>;

// Sums on their way out, `kept` of the token `first`.
template <class D>
TWOFOUR_INLINE void leave_sums(const WindowCall& a, const DwordPanels<D>& w, const typename D::Sum* sums, int64_t vectors,
                               const typename D::Token* kept, int64_t first, int64_t tokens, int64_t row, int64_t end) {
  if constexpr (D::per == 4)
    finish_windows<typename D::V>(a, w.rows, reinterpret_cast<const int32_t*>(sums), vectors, tokens, kept - first, first, tokens,
                                  row, end);
  else D::finish(a, w.rows, sums, vectors, kept, first, tokens, row, end);
}

// One token as a row of dwords; what stands behind its inputs in the last one is zero.
template <class D>
inline void dword_row(const WindowCall& a, int64_t token, char* to, int64_t bytes, typename D::Token* kept) {
  const int64_t given = a.in_features * (4 / D::per);
  bool window = false;
  if constexpr (D::per == 4) {
    if ((window = a.windows != nullptr)) {
      const WindowAt at(*a.windows, token);
      *kept = at.range();
      for (int64_t r = 0; r < a.windows->height.taps; r++) copy_taps(*a.windows, at, r, reinterpret_cast<uint8_t*>(to), 8);
    }
  }
  if (!window) D::copy_token(a, token, to, kept);
  std::memset(to + given, 0, static_cast<size_t>(bytes - given));
}

// Tokens [first, first + tokens) -> to[dword][tokens].
template <class D>
inline void dword_block(const WindowCall& a, const DwordPanels<D>& w, int64_t first, int64_t tokens, char* scratch, float* to,
                        typename D::Token* kept) {
  constexpr int64_t width = D::V::width;
  if (a.tokens == 1) return dword_row<D>(a, first, reinterpret_cast<char*>(to), w.row_bytes, kept);
  for (int64_t t = 0; t < tokens; t += width) {
    const int64_t count = least(width, tokens - t);
    for (int64_t r = 0; r < count; r++)
      dword_row<D>(a, first + t + r, scratch + r * w.row_bytes, w.row_bytes, kept + t + r);
    turn_rows<typename D::V>(reinterpret_cast<const float*>(scratch), w.row_bytes / 4, count, w.dwords, to + t, tokens);
  }
}

constexpr int64_t kDwordPanels = 8;  // panels whose sums of one token leave together

// One token by a panel -> its sums.
template <class D>
TWOFOUR_NOINLINE void dword_token(const DwordPanels<D>& w, int64_t panel, const float* x, typename D::Sum* to) {
  using V = typename D::V;
  constexpr int each = DwordPanels<D>::each, sets = each >= 8 ? 1 : 8 / each;
  typename D::Sum sums[sets][each] = {};
  const float* weight = w.panel(panel);
  const auto add = [&](int set) __attribute__((always_inline)) {
    const typename V::reg one = V::broadcast(x++);
    TWOFOUR_UNROLL
    for (int v = 0; v < each; v++, weight += V::width) sums[set][v] = D::dot(sums[set][v], one, V::load_aligned(weight));
  };
  int64_t left = w.dwords;
  for (; left >= sets; left -= sets) {
    TWOFOUR_UNROLL
    for (int s = 0; s < sets; s++) add(s);
  }
  for (; left > 0; left--) add(0);
  TWOFOUR_UNROLL
  for (int s = 1; s < sets; s++) {
    TWOFOUR_UNROLL
    for (int v = 0; v < each; v++) sums[0][v] = D::add(sums[0][v], sums[s][v]);
  }
  TWOFOUR_UNROLL
  for (int v = 0; v < each; v++) to[v] = sums[0][v];
}

// One token by panels [begin, end).
template <class D>
inline void dword_one(const WindowCall& a, const DwordPanels<D>& w, int64_t begin, int64_t end, const float* x,
                      const typename D::Token* kept) {
  constexpr int64_t each = DwordPanels<D>::each;
  typename D::Sum sums[kDwordPanels * each];
  for (int64_t done = begin, count; done < end; done += count) {
    count = least(kDwordPanels, end - done);
    const int64_t first = a.upwards ? begin + end - done - count : done;
    for (int64_t p = 0; p < count; p++) {
      const int64_t panel = a.upwards ? count - 1 - p : p;
      dword_token<D>(w, first + panel, x, sums + panel * each);
    }
    const int64_t last = least(a.out_features, (first + count) * kDensePanel);
    leave_sums<D>(a, w, sums, count * each, kept, 0, 1, first * kDensePanel, last);
  }
}

// T tokens from `first` on by a panel.
template <class D, int T>
TWOFOUR_NOINLINE void dword_tokens(const WindowCall& a, const DwordPanels<D>& w, int64_t panel, const float* block, int64_t first,
                                   const typename D::Token* kept, Ahead ahead) {
  using V = typename D::V;
  constexpr int vectors = DwordPanels<D>::vectors, wide = DwordPanels<D>::wide;
  const int64_t end = least(a.out_features, (panel + 1) * kDensePanel);
  for (int64_t at = 0; at < kDensePanel && panel * kDensePanel + at < end; at += wide) {
    const float *weight = w.panel(panel) + at, *x = block;
    typename D::Sum sums[vectors][T];  // set one by one: gcc 12 keeps an array that starts as {} in memory too, and clears that
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) {
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) sums[v][t] = typename D::Sum{};
    }
    for (int64_t k = w.dwords; k > 0; k--, weight += kDensePanel, x += T) {
      ahead.fetch();
      typename V::reg part[vectors];
      TWOFOUR_UNROLL
      for (int v = 0; v < vectors; v++) part[v] = V::load_shared(weight + v * V::width);
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        const typename V::reg one = V::broadcast_shared(x + t);
        TWOFOUR_UNROLL
        for (int v = 0; v < vectors; v++) sums[v][t] = D::dot(sums[v][t], one, part[v]);
      }
    }
    typename D::Sum answer[vectors * T];
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) {
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) answer[v * T + t] = sums[v][t];
    }
    leave_sums<D>(a, w, answer, vectors, kept, first, T, panel * kDensePanel + at, end);
  }
}

template <class D, int T = DwordPanels<D>::most>
void dword_tokens_of(int64_t tokens, const WindowCall& a, const DwordPanels<D>& w, int64_t panel, const float* block,
                     int64_t first, const typename D::Token* kept, const Ahead& ahead) {
  if (tokens == T) return dword_tokens<D, T>(a, w, panel, block, first, kept, ahead);
  if constexpr (T > 1) dword_tokens_of<D, T - 1>(tokens, a, w, panel, block, first, kept, ahead);
}

template <class D>
int64_t dword_panels_workspace(const Matmul& a, const Windows* windows = nullptr) {
  return a.tokens > 0 ? DwordPanels<D>(a).bytes(a.threads) + ImagesOf<D>(a, windows).size() : 0;
}

// The members pack the blocks of a chunk together, then share its units, the blocks of a panel one after the other.
template <class D>
void dword_panels(const Matmul& given, const Windows* windows = nullptr) {
  if (given.tokens <= 0) return;
  const ImagesOf<D> images(given, windows);
  const WindowCall a = images.call();
  const DwordPanels<D> w(a);
  auto* kept = static_cast<typename D::Token*>(a.workspace);
  char* scratch = static_cast<char*>(a.workspace) + w.kept_bytes;
  char* packed = scratch + (a.threads > 1 ? a.threads : 1) * w.rows_bytes;
  with_team(a.threads, [&](const Team& team) {
    images.fill(team);
    for (int64_t b0 = 0; b0 < w.blocks; b0 += w.chunk) {
      const int64_t count = least(w.chunk, w.blocks - b0);
      const auto block = [&](int64_t b) { return reinterpret_cast<float*>(packed + b * w.block_bytes()); };
      int64_t begin, end;
      if (b0 > 0) team.barrier();  // the last blocks are still being read
      team.share(count, 1, &begin, &end);
      for (int64_t b = begin; b < end; b++) {
        const int64_t first = w.first(a, b0 + b), next = w.first(a, b0 + b + 1);
        dword_block<D>(a, w, first, next - first, scratch + team.me * w.rows_bytes, block(b), kept + first);
      }
      team.barrier();
      team.share(w.panels * count, 1, &begin, &end);
      if (a.tokens == 1) {
        dword_one<D>(a, w, begin, end, block(0), kept);
        continue;
      }
      for (int64_t done = begin; done < end; done++) {
        const int64_t u = a.upwards ? begin + end - done - 1 : done;
        const int64_t b = u % count, first = w.first(a, b0 + b), next = w.first(a, b0 + b + 1);
        // A pass over a panel is one over all of its rows for each of its `wide` outputs.
        const int64_t panel = u / count, after = a.upwards ? panel - 1 : panel + 1, passes = kDensePanel / DwordPanels<D>::wide;
        const bool follows = begin / count <= after && after * count < end;
        const Ahead ahead = Ahead::of(follows ? w.panel(after) : nullptr, b, count, w.dwords).spread(passes);
        dword_tokens_of<D>(next - first, a, w, panel, block(b), first, kept + first, ahead);
      }
    }
  });
}

}  // namespace
