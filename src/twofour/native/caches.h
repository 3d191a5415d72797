// Sizes of the processor's caches, by which kernels choose how they move what they read and write.
#pragma once

#include <cstdint>

namespace twofour {

// Bytes of the cache of a level, of the first processor, as Linux lists it; elsewhere, or where it lists none, `other`.
int64_t cache_bytes(int level, int64_t other);

// Half of a cache of the second level, read once: bytes of activations that stay there beside the weights which stream
// past them. Where the system tells no size, half of 1 MB.
int64_t half_second_level();

}  // namespace twofour
