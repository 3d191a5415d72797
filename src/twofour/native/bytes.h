// Numbers and texts in a row of bytes, lowest byte first, written and read again. A reader believes nothing: it throws
// `Malformed` where bytes end too soon or say what nobody writes.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace twofour {

static_assert(std::endian::native == std::endian::little);

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ByteWriter {
 public:
  template <class Number>
  void number(Number value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(const std::string& text) {
    number(static_cast<uint16_t>(text.size()));
    bytes_ += text;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class ByteReader {
 public:
  ByteReader(const char* begin, uint64_t size) : at_(begin), end_(begin + size) {}

  uint64_t left() const { return static_cast<uint64_t>(end_ - at_); }

  // The next `count` bytes.
  const char* take(uint64_t count) {
    if (count > left()) throw Malformed("it ends in the middle of its description");
    const char* found = at_;
    at_ += count;
    return found;
  }
  template <class Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  // How many of what takes at least `bytes` bytes each follow, at most `most`: nothing is reserved for what is not there.
  uint32_t count(uint32_t most, uint64_t bytes, const char* what) {
    const auto found = number<uint32_t>();
    if (found > most || found > left() / bytes)
      throw Malformed(std::to_string(found) + " " + what + ", more than there can be");
    return found;
  }
  std::string text() {
    const auto size = number<uint16_t>();
    const char* found = take(size);
    for (uint16_t i = 0; i < size; i++)  // what is shown to somebody
      if (found[i] < ' ' || found[i] > '~') throw Malformed("a text that is not printable ASCII");
    return {found, size};
  }

 private:
  const char *at_, *end_;
};

}  // namespace twofour
