// A product with the normalisations of its rows, or two in a row, y = last(activation(first(x)) [* gate(x)]), by strips of
// tokens: what is between them never exists whole. A strip's rows stay in a cache where all tokens' would not; weights are
// read once for each strip. Products of any family serve. Rows are normalised inside a product where that does so, else a
// strip at a time beside it.
#pragma once

#include <algorithm>

#include "kernels/products.h"
#include "kernels/row_norm.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "native/scratch.h"

namespace twofour {

constexpr int64_t kStripBytes = 1 << 20;    // of what is between the products: an L2
constexpr int64_t kSmallStrip = 1 << 18;    // the same beside weights that stay in that L2: reading them again is cheap
constexpr int64_t kSmallWeights = 1 << 19;  // bytes of those weights, as if they were dense
constexpr int64_t kStripTokens = 64;        // at least, for each thread: a strip reads the weights from memory once more
constexpr int64_t kPanelStripTokens = 128;  // the same of products that work on panels of up to so many tokens
constexpr int64_t kPanelVector = 16;        // tokens of a vector of those, at most

// A normalisation of rows, of a strip or of all tokens.
struct StripRows {
  const NormKernel* kernel = nullptr;
  Norm norm{};
  static void run(const void* state, int64_t begin, int64_t end) {
    const auto& self = *static_cast<const StripRows*>(state);
    self.kernel->run(self.norm, begin, end);
  }
  void all(int threads) const {
    const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, norm.width));  // as norm/bind.cc
    parallel_for(norm.rows, grain, threads, [&](int64_t begin, int64_t end) { run(this, begin, end); });
  }
};

// What is called: tensors of all tokens, of one type but for what is bytes.
struct FusedMatmul {
  Part first, gate, last;  // the first two may have no product: the last one then reads x
  Activation activation;   // of `first`
  Epilogue epilogue;       // of `last`
  StripRows before, after;  // of rows of x, and of rows of y, or without a kernel; what they write is set for each strip
  Type type;  // float32 or bfloat16
  const char* x;
  int64_t x_stride;
  char *y, *normed;  // contiguous; `normed` may be y, and is null where its bytes alone are wanted
  int64_t tokens, width;  // of x
  int threads;
  bool x_whole = false, held_whole = false;  // whether x, and what the last of two products reads, are bytes

  bool two() const { return first.product != nullptr; }
  bool gated() const { return gate.product != nullptr; }
  int64_t size() const { return type == Type::bf16 ? 2 : 4; }
  Type held() const { return (two() ? held_whole : x_whole) ? Type::u8 : type; }  // what the last product reads
  int64_t held_size() const { return held() == Type::u8 ? 1 : size(); }
  // Reads and answers of one of the products.
  Type from(const Part& part) const { return &part == &last ? held() : x_whole ? Type::u8 : type; }
  Type to(const Part& part) const { return &part == &first ? held() : type; }
  // What reads x first, and normalises it where it can.
  const Part& reader() const { return gated() ? gate : two() ? first : last; }

  // Numbers of all weights, zeros too.
  int64_t numbers() const { return last.in * last.out + (two() ? first.in * first.out * (gated() ? 2 : 1) : 0); }

  // Tokens of a strip; the last one may have fewer. Beside panels a strip is whole vectors of them: two of 98 and 99 tokens
  // take 14 vectors of 16, of 112 and 85 tokens 13.
  int64_t strip() const {
    const bool whole = reader().product->whole_rows && last.product->whole_rows;
    // Bytes that a token leaves in a cache for the next pass over it.
    int64_t row = two() ? first.out * (held_size() + (gated() ? size() : 0)) : 0;
    if (!two() && !whole) row = ((before.kernel ? last.in : 0) + (after.kernel ? last.out : 0)) * size();
    if (row == 0 || tokens == 0) return tokens;
    const int64_t bytes = numbers() * size() <= kSmallWeights ? kSmallStrip : kStripBytes;
    const int64_t fit = bytes / row, panels = fit / kPanelStripTokens * kPanelStripTokens;
    const int64_t most = whole ? std::max(kStripTokens * threads, fit) : std::max(kPanelStripTokens * threads, panels);
    return least(tokens, round_up(ceil_div(tokens, ceil_div(tokens, most)), whole ? 1 : kPanelVector));
  }
  // A smaller strip may need more workspace.
  int64_t workspace() const {
    int64_t most = 0;
    if (tokens == 0) return most;
    for (const Part* part : {&first, &gate, &last})
      for (int64_t rows : {strip(), (tokens - 1) % strip() + 1})
        most = std::max(most, part->workspace(rows, threads, from(*part), to(*part)));
    return most;
  }
};

// Runs one call; returns whether a weight was damaged.
class FusedRun {
 public:
  FusedRun(const FusedMatmul& all, Scratch& scratch)
      : all_(all),
        strip_(all.strip()),
        column_(strip_ * all.size()),
        space_(scratch, static_cast<size_t>(all.workspace())),
        held_(scratch, static_cast<size_t>(all.two() ? strip_ * all.held_size() * all.first.out : 0)),
        gates_(scratch, static_cast<size_t>(all.gated() ? column_ * all.first.out : 0)),
        normed_(scratch, static_cast<size_t>(all.before.kernel ? column_ * all.width : 0)) {}

  bool run() {
    for (int64_t begin = 0; begin < all_.tokens && !damaged_; begin += strip_) strip(begin, least(strip_, all_.tokens - begin));
    return damaged_;
  }

 private:
  void* at(const void* rows, int64_t index, int64_t stride) const {
    return const_cast<char*>(static_cast<const char*>(rows)) + index * stride * all_.size();
  }
  // The same of what may be missing.
  void* at_any(const void* rows, int64_t index, int64_t stride) const { return rows == nullptr ? nullptr : at(rows, index, stride); }
  Matmul call(const Part& part, const void* x, int64_t x_stride, void* y, int64_t rows) {
    Matmul made = part.call(x, x_stride, y, rows, all_.threads, all_.from(part), all_.to(part));
    made.workspace = space_.data();
    made.damaged = &damaged_;
    return made;
  }

  void strip(int64_t begin, int64_t rows) {
    const void* x = all_.x_whole ? all_.x + begin * all_.x_stride : at(all_.x, begin, all_.x_stride);
    int64_t stride = all_.x_stride;
    StripRows before = all_.before;
    before.norm.x = x, before.norm.y = normed_.data(), before.norm.rows = rows;
    const bool wanted = before.kernel && all_.reader().product->whole_rows;
    if (before.kernel) x = normed_.data(), stride = all_.width;
    if (before.kernel && !wanted) before.all(all_.threads);
    const StripRows* reads = wanted ? &before : nullptr;
    if (all_.two()) {
      between(x, stride, rows, reads);
      answer(held_.data(), all_.last.in, begin, rows, nullptr);
    } else {
      answer(x, stride, begin, rows, reads);
    }
  }

  static void normalise(Matmul* call, const StripRows* rows) {
    if (rows) call->rows_wanted = StripRows::run, call->wanted_state = rows;
  }

  // Rows of x -> what the last product reads.
  void between(const void* x, int64_t stride, int64_t rows, const StripRows* reads) {
    Matmul first = call(all_.first, x, stride, held_.data(), rows);
    first.epilogue.activation = all_.activation;
    if (all_.gated()) {
      Matmul gate = call(all_.gate, x, stride, gates_.data(), rows);
      normalise(&gate, reads);
      all_.gate.product->run(gate);
      first.epilogue.combine = Combine::multiply;
      first.epilogue.other = gates_.data(), first.epilogue.other_stride = all_.first.out;
    } else {
      normalise(&first, reads);
    }
    all_.first.product->run(first);
  }

  void answer(const void* x, int64_t stride, int64_t begin, int64_t rows, const StripRows* reads) {
    const int64_t width = all_.last.out;
    Matmul last = call(all_.last, x, stride, at(all_.y, begin, width), rows);
    last.epilogue = all_.epilogue;
    if (last.epilogue.other) last.epilogue.other = at(all_.epilogue.other, begin, all_.epilogue.other_stride);
    normalise(&last, reads);
    StripRows after = all_.after;
    after.norm.x = last.y, after.norm.y = at_any(all_.normed, begin, width), after.norm.rows = rows;
    if (after.norm.bytes != nullptr) after.norm.bytes += begin * width;
    const bool done = after.kernel && all_.last.product->whole_rows;
    if (done) last.rows_done = StripRows::run, last.rows_state = &after;
    all_.last.product->run(last);
    if (after.kernel && !done) after.all(all_.threads);
  }

  const FusedMatmul& all_;
  const int64_t strip_, column_;  // tokens of a strip, bytes of its columns
  const Scratch::Lease space_, held_, gates_, normed_;
  bool damaged_ = false;
};

}  // namespace twofour
