// Images as convolutions read and write them: tensors in torch.channels_last, through the border.
#pragma once

#include "native/operand.h"

namespace twofour {

// float32 (images, channels, height, width), channels densest and no gaps.
inline View pixels(const Border& border, const Operand& operand, const char* role) {
  const View view = border.strided(operand, role, {Type::f32});
  border.require(view.ndim == 4, operand, role, "torch.float32 (images, channels, height, width) on cpu");
  int64_t step = 1;
  for (const int i : {1, 3, 2, 0}) {
    border.require(view.shape[i] == 1 || view.strides[i] == step || view.count() == 0, operand, role,
                   "a tensor in torch.channels_last");
    step *= view.shape[i];
  }
  return view;
}
inline float* floats(const View& view) { return reinterpret_cast<float*>(view.data); }

}  // namespace twofour
