// Images as convolutions read and write them: tensors in torch.channels_last, through the border.
#pragma once

#include <array>

#include "kernels/conv_activation.h"
#include "kernels/conv_axis.h"
#include "native/binding.h"

namespace twofour {

// Whether the axes of a tensor stand without gaps, those named first densest.
inline bool stands(const View& view, std::array<int, 4> axes) {
  int64_t step = 1;
  for (const int i : axes) {
    if (view.shape[i] != 1 && view.strides[i] != step && view.count() != 0) return false;
    step *= view.shape[i];
  }
  return true;
}
// (images, channels, height, width), channels densest and no gaps; float32, or one of `types`. Where there is a `plane`,
// channels may be less dense than pixels: it is set to the floats between them then, else to 0.
inline View pixels(const Border& border, const Operand& operand, const char* role, Types types = {Type::f32},
                   int64_t* plane = nullptr) {
  const View view = border.strided(operand, role, types);
  border.require(view.ndim == 4, operand, role, types.text() + " (images, channels, height, width) on cpu");
  const bool last = stands(view, {1, 3, 2, 0});
  border.require(last || (plane && stands(view, {3, 2, 1, 0})), operand, role,
                 plane ? "a tensor in torch.channels_last or contiguous" : "a tensor in torch.channels_last");
  if (plane) *plane = last ? 0 : view.shape[2] * view.shape[3];
  return view;
}
// By its number in `conv.ACTIVATIONS`: those of products, then ReLU6.
inline ConvActivation conv_activation(int64_t number) {
  constexpr int relu6 = static_cast<int>(Activation::silu) + 1;
  if (number < 0 || number > relu6) throw std::invalid_argument("no such activation");
  if (number == relu6) return {Activation::relu, 6.0f};
  return {static_cast<Activation>(number)};
}

inline float* floats(const View& view) { return reinterpret_cast<float*>(view.data); }

using Axis = std::array<int64_t, 4>;

// Taps, stride, padding and dilation of an axis, and its pixels.
inline ConvAxis axis(const Axis& given, int64_t input, int64_t output) {
  const auto& [taps, stride, padding, dilation] = given;
  constexpr int64_t most = 1 << 30;  // products of two stay far below 2^63
  if (taps < 1 || taps > kConvTaps || stride < 1 || stride > most || padding < 0 || padding > most || dilation < 1 ||
      dilation > most)
    throw std::invalid_argument("no such convolution");
  return {input, output, taps, stride, padding, dilation};
}

// Refuses what a window reaches over where its pixels, each with `channels` numbers, repeated for every tap and 16 of a vector,
// take 2^60 bytes or more: kernels count them in int64. In double, which cannot wrap.
inline void require_halo(const ConvAxis& height, const ConvAxis& width, int64_t channels) {
  constexpr double most = double(int64_t{1} << 60);
  const auto reach = [](const ConvAxis& a) {
    return double(a.taps) * (double(a.output) * double(a.stride) + double(a.taps) * double(a.dilation));
  };
  if (reach(height) * reach(width) * double(channels) * 64 >= most) throw std::invalid_argument("no such convolution");
}

}  // namespace twofour
