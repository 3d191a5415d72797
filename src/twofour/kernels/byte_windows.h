// Windows over images of bytes as tokens of a product of whole numbers. Images of floats are rounded before the product
// begins, by the range of the call or by one of each image, as whole_inputs.h rounds a token; then each piece of tokens copies
// what its windows read. Included once per instruction set, with V the vector type of that file; internal linkage.
#pragma once

#include <cstdint>

#include "kernels/whole_inputs.h"
#include "kernels/whole_outputs.h"
#include "kernels/windows.h"
#include "native/compiler.h"
#include "native/integers.h"
#include "native/team.h"

namespace {

using twofour::Windows;

// Images as they are read.
struct ByteWindows : Windows {
  const uint8_t* bytes;
  int64_t image_bytes;     // from one image to the next
  const Range* ranges;     // of each image
  const uint8_t* outside;  // of each image a pixel of zeros: what windows read beside it
  int64_t outside_bytes;   // from one of these to the next
};

// A product whose tokens are windows, or, where there are none, rows of x.
struct WindowCall : Matmul {
  const ByteWindows* windows = nullptr;
};

// The images of a call whose tokens are windows; of any other call nothing.
template <class V>
class ByteImages {
 public:
  TWOFOUR_NOINLINE ByteImages(const Matmul& a, const Windows* windows) : given_(a), are_(windows != nullptr), size_(0) {
    if (!are_) return;
    static_cast<Windows&>(windows_) = *windows;
    numbers_ = windows_.height.input * windows_.width.input * windows_.channels;
    windows_.outside_bytes = round_up(windows_.channels, 64);
    windows_.image_bytes = rounds() ? round_up(numbers_, 64) : numbers_;
    const int64_t images = windows_.images;
    char* const space = static_cast<char*>(a.workspace);
    const auto take = [&](int64_t bytes) {
      const int64_t at = size_;
      size_ += round_up(bytes, 64);
      return space == nullptr ? nullptr : space + at;  // none while only the size is asked for
    };
    windows_.ranges = ranges_ = reinterpret_cast<Range*>(take(images * static_cast<int64_t>(sizeof(Range))));
    spans_ = reinterpret_cast<Span*>(take(finds() ? images * members() * static_cast<int64_t>(sizeof(Span)) : 0));
    outside_ = reinterpret_cast<uint8_t*>(take(images * windows_.outside_bytes));
    bytes_ = reinterpret_cast<uint8_t*>(take(rounds() ? images * windows_.image_bytes : 0));
    windows_.outside = outside_;
    windows_.bytes = rounds() ? bytes_ : static_cast<const uint8_t*>(a.x);
  }
  ByteImages(const ByteImages&) = delete;
  ByteImages& operator=(const ByteImages&) = delete;

  // Of the workspace, in front.
  int64_t size() const { return size_; }

  // The call on what is made here, in the rest of the workspace.
  WindowCall call() const {
    WindowCall a{given_};
    a.workspace = static_cast<char*>(a.workspace) + size_;
    if (are_) a.windows = &windows_;
    return a;
  }

  // Makes them, each member a part of every image, before any is read.
  void fill(const Team& team) const {
    if (!are_) return;
    given_.x_type == Type::bf16 ? fill_from(static_cast<const uint16_t*>(given_.x), team)
                                : fill_from(static_cast<const float*>(given_.x), team);
  }

 private:
  bool rounds() const { return given_.x_type != Type::u8; }
  bool finds() const { return rounds() && given_.quantization.dynamic; }
  int64_t members() const { return given_.threads > 1 ? given_.threads : 1; }

  template <class X>
  TWOFOUR_NOINLINE void fill_from(const X* x, const Team& team) const {
    int64_t begin, end;
    team.share(numbers_, 64, &begin, &end);
    if (finds()) {
      for (int64_t i = 0; i < windows_.images; i++)
        spans_[i * team.size + team.me] = span_of<V>(x + i * numbers_ + begin, end - begin);
      team.barrier();
    }
    Matmul part = given_;  // of an image, as a token of a static range
    part.in_features = end - begin;
    part.quantization.dynamic = false;
    for (int64_t i = 0; i < windows_.images; i++) {
      Range range;
      if (!static_range(given_, &range)) range = range_of_image(spans_ + i * team.size, team.size);
      part.quantization.x_scale = range.scale, part.quantization.x_zero = range.zero;
      if (rounds()) real_token<V>(part, x + i * numbers_ + begin, bytes_ + i * windows_.image_bytes + begin, 8);
      if (team.me != 0) continue;
      ranges_[i] = range;
      __builtin_memset(outside_ + i * windows_.outside_bytes, range.zero, static_cast<size_t>(windows_.outside_bytes));
    }
    team.barrier();
  }

  static TWOFOUR_NOINLINE Range range_of_image(const Span* spans, int64_t count) {
    float ends[2] = {0, 0};
    for (int64_t m = 0; m < count; m++) {
      if (spans[m].least < ends[0]) ends[0] = spans[m].least;
      if (spans[m].most > ends[1]) ends[1] = spans[m].most;
    }
    for (int64_t m = 0; m < count; m++)
      if (!spans[m].finite) ends[0] = __builtin_nanf("");
    return range_of<V>(static_cast<const float*>(ends), 2);
  }

  const Matmul& given_;
  const bool are_;
  ByteWindows windows_{};
  int64_t numbers_ = 0, size_;  // numbers of an image; bytes of all that is made
  Range* ranges_ = nullptr;
  Span* spans_ = nullptr;
  uint8_t *outside_ = nullptr, *bytes_ = nullptr;
};

// Of products that read rows alone.
class NoImages {
 public:
  NoImages(const Matmul& a, const Windows*) : given_(a) {}
  int64_t size() const { return 0; }
  WindowCall call() const { return {given_}; }
  void fill(const Team&) const {}

 private:
  const Matmul& given_;
};

// The window of a token.
class WindowAt {
 public:
  WindowAt() = default;
  WindowAt(const ByteWindows& w, int64_t token) : w_(&w) {
    const int64_t line = token / w.width.output;
    column_ = token % w.width.output;
    row_ = line % w.height.output;
    image_ = line / w.height.output;
  }
  void next() {
    if (++column_ < w_->width.output) return;
    column_ = 0;
    if (++row_ < w_->height.output) return;
    row_ = 0;
    image_++;
  }
  Range range() const { return w_->ranges[image_]; }
  // The pixels that a row of taps reads, where they stand side by side in the image; else null.
  const uint8_t* row(int64_t row_tap) const {
    const twofour::ConvAxis& wide = w_->width;
    const int64_t column = column_ * wide.stride - wide.padding;
    const bool together = wide.dilation == 1 && column >= 0 && column + wide.taps <= wide.input;
    const uint8_t* const first = together ? pixel(row_tap, 0) : nullptr;
    return first == w_->outside + image_ * w_->outside_bytes ? nullptr : first;
  }
  // The pixel that a tap reads.
  const uint8_t* pixel(int64_t row_tap, int64_t column_tap) const {
    const twofour::ConvAxis &high = w_->height, &wide = w_->width;
    const int64_t row = row_ * high.stride - high.padding + row_tap * high.dilation;
    const int64_t column = column_ * wide.stride - wide.padding + column_tap * wide.dilation;
    const bool inside = row >= 0 && row < high.input && column >= 0 && column < wide.input;
    return inside ? w_->bytes + image_ * w_->image_bytes + (row * wide.input + column) * w_->channels
                  : w_->outside + image_ * w_->outside_bytes;
  }

 private:
  const ByteWindows* w_ = nullptr;
  int64_t image_ = 0, row_ = 0, column_ = 0;
};

// Inputs [k, k + count) of a token, 8 bytes every `stride`; where these stand apart, both are multiples of 8, or of 4.
inline void copy_inputs(const uint8_t* from, int64_t count, uint8_t* to, int64_t k, int64_t stride) {
  if (stride == 8) {
    __builtin_memcpy(to + k, from, static_cast<size_t>(count));
  } else if (count % 8 == 0 && k % 8 == 0) {
    for (int64_t i = 0; i < count; i += 8) __builtin_memcpy(to + (k + i) / 8 * stride, from + i, 8);
  } else {
    for (int64_t i = 0; i < count; i += 4) __builtin_memcpy(to + (k + i) / 8 * stride + (k + i) % 8, from + i, 4);
  }
}

// What a row of taps reads, as the inputs of a token.
inline void copy_taps(const ByteWindows& w, const WindowAt& at, int64_t row, uint8_t* to, int64_t stride) {
  const int64_t taps = w.width.taps, first = row * taps * w.channels;
  if (const uint8_t* const together = at.row(row)) return copy_inputs(together, taps * w.channels, to, first, stride);
  for (int64_t c = 0; c < taps; c++) copy_inputs(at.pixel(row, c), w.channels, to, first + c * w.channels, stride);
}

// Sums on their way out where a second operand is added before the activation, none or ReLU, or a ReLU has a bound; one function
// for all types of an answer, which is the same for all sums of a call.
template <class V>
TWOFOUR_NOINLINE void finish_added(const WindowCall& a, const WholeRows& weight, const int32_t* sums, int64_t vectors, int64_t stride,
                                   const Range* ranges, int64_t first, int64_t tokens, int64_t row, int64_t end) {
  const bool low = a.windows->added == Type::bf16, adds = a.epilogue.combine != Combine::none;
  const auto floor = V::all(a.epilogue.activation == Activation::relu ? 0.0f : -__builtin_inff());
  const auto most = V::all(a.windows->most);
  for (int64_t v = 0; v < vectors && row + v * V::width < end; v++) {
    const Finish<V, false> finish(a, weight, ranges[first], row + v * V::width, end);
    for (int64_t t = 0; t < tokens; t++) {
      const auto* from = reinterpret_cast<const uint8_t*>(sums + (v * stride + t) * V::width);
      auto answer = apart(finish.product(V::load_ints(from), ranges[first + t])) + finish.bias;
      if (adds) {
        const int64_t at = (first + t) * a.epilogue.other_stride + finish.row;
        answer = answer + (low ? V::load(static_cast<const uint16_t*>(a.epilogue.other) + at, finish.rows)
                               : V::load(static_cast<const float*>(a.epilogue.other) + at, finish.rows));
      }
      answer = V::min(most, V::max(floor, answer));  // a NaN stays
      if (a.y_type == Type::f32) {
        finish.template store<Type::f32>(answer, first + t);
      } else if (a.y_type == Type::bf16) {
        finish.template store<Type::bf16>(answer, first + t);
      } else {
        auto* const to = static_cast<uint8_t*>(a.y) + (first + t) * a.y_stride + row + v * V::width;
        V::store_bytes(to, finish.rounder(answer), finish.rows);
      }
    }
  }
}

// As finish_sums, for products whose tokens may be windows.
template <class V>
inline void finish_windows(const WindowCall& a, const WholeRows& weight, const int32_t* sums, int64_t vectors, int64_t stride,
                           const Range* ranges, int64_t first, int64_t tokens, int64_t row, int64_t end) {
  if (a.windows != nullptr && (a.epilogue.combine != Combine::none || a.windows->most < __builtin_inff()))
    return finish_added<V>(a, weight, sums, vectors, stride, ranges, first, tokens, row, end);
  if constexpr (V::width >= 8)
    finish_sums<V>(a, weight, sums, vectors, stride, ranges, first, tokens, row, end);
  else
    with_answers(a, [&](auto as) {  // portable code has no form of its own for one range: the same bits, half the code
      finish_as<V, decltype(as), false>(a, weight, sums, vectors, stride, ranges, first, tokens, row, end);
    });
}

}  // namespace
