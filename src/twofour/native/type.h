// Types of the numbers that tensors hold, as kernels know them.
#pragma once

namespace twofour {

enum class Type : int { f32, bf16, u8, s8, boolean, s64, other };

}  // namespace twofour
