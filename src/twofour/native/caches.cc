// The caches as the system lists them. In a source of its own: objects of instruction sets carry no copy of it.
#include "native/caches.h"

#include <cstdio>

namespace twofour {

// Not sysconf(_SC_LEVEL3_CACHE_SIZE): glibc reckons it from the processor's identity, in a virtual machine ten times too large.
int64_t cache_bytes(int level, int64_t other) {
  for (int index = 0; index < 8; index++) {
    const auto number = [&](const char* of, char* unit) {
      char path[96];
      std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, of);
      long long value = 0;
      if (std::FILE* file = std::fopen(path, "r")) {
        if (std::fscanf(file, "%lld%c", &value, unit) < 1) value = 0;
        std::fclose(file);
      }
      return static_cast<int64_t>(value);
    };
    char unit = 0;
    if (number("level", &unit) != level) continue;
    const int64_t size = number("size", &unit);
    const int64_t bytes = unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : size;
    if (bytes > (64 << 10)) return bytes;  // not an instruction cache of the first level, nor a file of another form
  }
  return other;
}

int64_t half_second_level() {
  static const int64_t bytes = cache_bytes(2, int64_t{1} << 20) / 2;
  return bytes;
}

}  // namespace twofour
