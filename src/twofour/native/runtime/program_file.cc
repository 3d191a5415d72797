#include "program_file.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "native/scratch.h"
#include "digest.h"

namespace twofour {
namespace {

constexpr char kMagic[8] = {'2', '4', 'P', 'R', 'O', 'G', '\r', '\n'};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kHeader = 64, kAlignment = 64;
constexpr int kMostAxes = 16;
constexpr int64_t kMostBytes = int64_t{1} << 40;
constexpr int64_t kMostNumbers = kMostBytes;
constexpr int64_t kMostRepeated = int64_t{1} << 28;  // of a tensor in which one number in memory stands for several

struct Header {
  char magic[8];
  uint32_t version, reserved;
  uint64_t size, description, constants;  // of the file; of its description, which follows; where the constants begin
  uint64_t unused[2];
  uint64_t digest;  // of what follows the header, seeded with that of the fields before
};
static_assert(sizeof(Header) == kHeader);

[[noreturn]] void malformed(const std::string& what) { throw Malformed(what); }

int64_t width_of(Type type) {
  switch (type) {
    case Type::f32: return 4;
    case Type::bf16: return 2;
    case Type::s64: return 8;
    default: return 1;
  }
}

Type read_type(ByteReader& from) {
  const auto type = from.number<uint8_t>();
  if (type >= static_cast<uint8_t>(Type::other)) malformed("a type of numbers that there is none of");
  return static_cast<Type>(type);
}

std::vector<int64_t> read_sizes(ByteReader& from, int axes) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < axes; i++) sizes.push_back(from.number<int64_t>());
  return sizes;
}

// Type, shape and strides; at least one number.
Geometry read_geometry(ByteReader& from, bool strided) {
  const Type type = read_type(from);
  const int axes = from.number<uint8_t>();
  if (axes > kMostAxes) malformed("a tensor of " + std::to_string(axes) + " axes");
  std::vector<int64_t> shape = read_sizes(from, axes), strides(static_cast<size_t>(axes), 1);
  int64_t numbers = 1;
  for (int i = axes - 1; i >= 0; i--) {
    strides[static_cast<size_t>(i)] = numbers;
    if (shape[static_cast<size_t>(i)] < 1 || __builtin_mul_overflow(numbers, shape[static_cast<size_t>(i)], &numbers) ||
        numbers > kMostNumbers)
      malformed("a tensor of impossible sizes");
  }
  if (strided) strides = read_sizes(from, axes);
  for (const int64_t stride : strides)  // those of axes of one number as well: loops may step over it once
    if (stride < 0 || stride > kMostNumbers) malformed("a tensor of impossible strides");
  Geometry found(type, width_of(type), std::move(shape), std::move(strides));
  try {
    const int64_t bytes = found.reach();
    if (bytes > kMostBytes || (numbers > kMostRepeated && bytes / found.width < numbers)) malformed("a tensor of impossible sizes");
  } catch (const std::invalid_argument&) {
    malformed("a tensor of impossible strides");
  }
  return found;
}

NamedTensor read_named(ByteReader& from, const std::vector<NamedTensor>& before) {
  NamedTensor found;
  found.name = from.text();
  if (found.name.empty()) malformed("an input or output without a name");
  for (const NamedTensor& one : before)
    if (one.name == found.name) malformed("two inputs or outputs of one name");
  const Geometry geometry = read_geometry(from, false);
  found.type = geometry.type, found.shape = geometry.shape, found.bytes = geometry.reach();
  return found;
}

class ProgramReader {
 public:
  ProgramReader(ByteReader& from, const std::vector<Constant>& constants) : from_(from), constants_(constants) {}

  Program read() {
    const uint32_t inputs = from_.count(1 << 10, 12, "inputs");
    for (uint32_t i = 0; i < inputs; i++) program_.inputs.push_back(read_named(from_, program_.inputs));
    program_.arena = from_.number<int64_t>();
    if (program_.arena < 0 || program_.arena > kMostBytes) malformed("memory of impossible size");
    const uint32_t places = from_.count(1 << 20, 14, "places");
    for (uint32_t i = 0; i < places; i++) read_place();
    const uint32_t calls = from_.count(1 << 20, 10, "calls");
    for (uint32_t i = 0; i < calls; i++) read_call();
    const uint32_t outputs = from_.count(1 << 10, 12, "outputs");
    for (uint32_t i = 0; i < outputs; i++) read_output();
    return std::move(program_);
  }

 private:
  int64_t bytes_of(uint32_t buffer) const {
    if (buffer == 0) return program_.arena;
    const size_t inputs = program_.inputs.size();
    if (buffer <= inputs) return program_.inputs[buffer - 1].bytes;
    if (buffer - 1 - inputs >= constants_.size()) malformed("memory that is not there");
    return constants_[buffer - 1 - inputs].bytes;
  }

  void read_place() {
    const auto buffer = from_.number<uint32_t>();
    const auto offset = from_.number<int64_t>();
    Placed found{buffer, offset, read_geometry(from_, true)};
    const int64_t bytes = bytes_of(buffer), reach = found.geometry.reach();
    if (offset < 0 || reach > bytes || offset > bytes - reach || offset % found.geometry.width != 0)
      malformed("a tensor outside its memory");
    if (buffer >= 1 && buffer <= program_.inputs.size() &&  // whose address is a multiple of its own numbers' size alone
        found.geometry.width > width_of(program_.inputs[buffer - 1].type))
      malformed("wider numbers in an input than its own");
    program_.places.push_back(std::move(found));
  }

  int32_t read_index() {
    const auto index = from_.number<int32_t>();
    if (index < -1 || index >= static_cast<int64_t>(program_.places.size())) malformed("a tensor that is not there");
    return index;
  }

  void read_call() {
    const std::string name = from_.text();
    const auto size = from_.number<uint32_t>();
    ByteReader arguments(from_.take(size), size);
    const auto& all = bound_calls();
    const auto bound = std::find_if(all.begin(), all.end(), [&](const BoundCall& one) { return one.name == name; });
    if (bound == all.end())
      throw Refusal{"a program calls what this library does not have", name, "a call of its own", "a newer library"};
    std::vector<bool> written;
    ProgramCall found{bound->read(arguments, &written), {}};
    if (from_.count(1 << 16, 4, "operands") != written.size()) malformed("a call with another number of operands");
    for (size_t i = 0; i < written.size(); i++) found.operands.push_back(read_index());
    for (size_t i = 0; i < written.size(); i++)
      if (written[i]) require_writable(found.operands, i);
    program_.calls.push_back(std::move(found));
  }

  // Calls write into the arena alone. What they look at before they start, numbers that say where others stand and packed
  // weights, must not change under them.
  void require_writable(const std::vector<int32_t>& operands, size_t answer) const {
    if (operands[answer] == -1) return;
    const Placed& to = program_.places[static_cast<size_t>(operands[answer])];
    if (to.buffer != 0) malformed("a call that writes into an input or a constant");
    for (size_t i = 0; i < operands.size(); i++) {
      if (i == answer || operands[i] == -1) continue;
      const Placed& other = program_.places[static_cast<size_t>(operands[i])];
      const bool apart = other.buffer != 0 || other.offset >= to.offset + to.geometry.reach() ||
                         to.offset >= other.offset + other.geometry.reach();
      const bool values = other.geometry.type == Type::f32 || other.geometry.type == Type::bf16;
      if (!apart && !values) malformed("a call that writes into what it reads by");
    }
  }

  void read_output() {
    NamedTensor found = read_named(from_, program_.outputs);
    found.where = read_index();
    if (found.where == -1) malformed("an output that is nowhere");
    const Geometry& geometry = program_.places[static_cast<size_t>(found.where)].geometry;
    if (geometry.type != found.type || geometry.shape != found.shape) malformed("an output of another type or shape");
    program_.outputs.push_back(std::move(found));
  }

  ByteReader& from_;
  const std::vector<Constant>& constants_;
  Program program_;
};

}  // namespace

AlignedMemory aligned_memory(uint64_t size) {
  const uint64_t page = size >= kHugePage ? kHugePage : kAlignment;
  if (size > static_cast<uint64_t>(kMostBytes)) throw std::bad_alloc();
  const uint64_t rounded = std::max<uint64_t>(page, (size + page - 1) / page * page);
  char* data = static_cast<char*>(allocate_aligned(page, rounded));
  if (!data) throw std::bad_alloc();
  advise_huge_pages(data, rounded);
  return {data, free_aligned};
}

ProgramFile::ProgramFile(AlignedMemory held, uint64_t size) : memory(std::move(held)) {
  char* const data = memory.get();
  Header header;
  if (size < kHeader) malformed("it is shorter than a header");
  std::memcpy(&header, data, kHeader);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) malformed("it does not begin as such a file does");
  if (header.version != kVersion)
    throw OtherVersion("version " + std::to_string(header.version) + " of the format; this library reads " + std::to_string(kVersion));
  if (header.size != size)
    malformed(std::to_string(size) + " bytes, where its header says " + std::to_string(header.size));
  if (digest(data + kHeader, size - kHeader, digest(data, kHeader - sizeof header.digest)) != header.digest)
    malformed("its digest is another one than its bytes': they were changed or cut");
  if (header.description > size - kHeader || header.constants % kAlignment != 0 || header.constants > size ||
      header.constants < kHeader + header.description)
    malformed("parts outside of it");
  ByteReader from(data + kHeader, header.description);
  const uint32_t count = from.count(1 << 20, 16, "constants");
  for (uint32_t i = 0; i < count; i++) {
    const auto offset = from.number<uint64_t>();
    const auto bytes = from.number<uint64_t>();
    if (offset % kAlignment != 0 || offset > size - header.constants || bytes > size - header.constants - offset)
      malformed("a constant outside of it");
    constants.push_back({data + header.constants + offset, static_cast<int64_t>(bytes)});
  }
  const uint32_t listed = from.count(1 << 10, 24, "programs");
  for (uint32_t i = 0; i < listed; i++) programs.push_back(ProgramReader(from, constants).read());
  if (programs.empty()) malformed("no program");
  if (from.left() != 0) malformed("more than its programs");
}

}  // namespace twofour
