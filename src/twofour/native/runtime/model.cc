#include "model.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

namespace twofour {
namespace {

std::string shape_text(const int64_t* shape, int axes) {
  std::string text;
  for (int i = 0; i < axes; i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return "(" + text + ")";
}

std::string type_text(int type) {
  if (type < 0 || type >= static_cast<int>(Type::other)) return "type " + std::to_string(type);
  return Types{static_cast<Type>(type)}.text().substr(std::strlen("torch."));
}

std::string text_of(const NamedTensor& one) {
  return "`" + one.name + "` " + type_text(static_cast<int>(one.type)) + " " +
         shape_text(one.shape.data(), static_cast<int>(one.shape.size()));
}
std::string text_of(const GivenTensor& one) {
  return std::string("`") + one.name + "` " + type_text(one.type) + " " + shape_text(one.shape, one.shape ? one.axes : 0);
}

template <class Tensors>
std::string listed(const Tensors& tensors) {
  std::string all;
  for (const auto& one : tensors) all += (all.empty() ? "" : ", ") + text_of(one);
  return all.empty() ? "none" : all;
}

bool fits(const NamedTensor& wanted, const GivenTensor& given) {
  return given.type == static_cast<int>(wanted.type) && static_cast<size_t>(given.axes) == wanted.shape.size() &&
         std::equal(wanted.shape.begin(), wanted.shape.end(), given.shape);
}

const GivenTensor* called(std::span<const GivenTensor> given, const std::string& name) {
  for (const GivenTensor& one : given)
    if (name == one.name) return &one;
  return nullptr;
}

bool takes(const Program& program, std::span<const GivenTensor> inputs) {
  return program.inputs.size() == inputs.size() && std::all_of(program.inputs.begin(), program.inputs.end(), [&](const auto& wanted) {
           const GivenTensor* given = called(inputs, wanted.name);
           return given && fits(wanted, *given);
         });
}

// The numbers of a strided tensor, one after the other, from axis `axis` on; returns where the next ones go.
char* copy_out(const View& from, const char* data, int axis, char* to) {
  if (axis == from.ndim) {
    std::memcpy(to, data, static_cast<size_t>(from.width));
    return to + from.width;
  }
  for (int64_t i = 0; i < from.shape[axis]; i++) to = copy_out(from, data + i * from.strides[axis] * from.width, axis + 1, to);
  return to;
}

void copy(const View& from, char* to) {
  if (from.contiguous()) std::memcpy(to, from.data, static_cast<size_t>(from.count() * from.width));
  else copy_out(from, from.data, 0, to);
}

int64_t width_of(const NamedTensor& one) {
  int64_t count = 1;
  for (const int64_t size : one.shape) count *= size;
  return one.bytes / count;
}

void require(const GivenTensor& given, const NamedTensor& wanted, bool output) {
  const auto needed = static_cast<uint64_t>(wanted.bytes);
  if (!given.data || (output ? given.bytes < needed : given.bytes != needed))
    throw Unfit(text_of(wanted) + " takes " + std::to_string(needed) + " bytes; got " +
                (given.data ? std::to_string(given.bytes) : std::string("NULL")));
  if (reinterpret_cast<uintptr_t>(given.data) % static_cast<uintptr_t>(width_of(wanted)) != 0)
    throw Unfit(text_of(wanted) + " stands at an address that is no multiple of a number's size");
}

// Bytes of the largest arena that is kept for the next run. The system hands out larger ones as zeros, of which only what
// is written takes memory, whatever a file asks for.
constexpr int64_t kMostKept = int64_t{1} << 25;

}  // namespace

void Model::run(std::span<const GivenTensor> inputs, std::span<const GivenTensor> outputs) {
  const auto& all = file_.programs;
  const auto found = std::find_if(all.begin(), all.end(), [&](const Program& one) { return takes(one, inputs); });
  if (found == all.end()) {
    std::string wanted;
    for (size_t i = 0; i < all.size() && i < 8; i++) wanted += (i ? "; or " : "") + listed(all[i].inputs);
    throw Unfit("no program takes these inputs; got " + listed(inputs) + "; wanted " + wanted +
                (all.size() > 8 ? "; or others" : "") + "; write the file with an example of this size as well");
  }
  const Program& program = *found;
  std::vector<char*> buffers{nullptr};
  for (const NamedTensor& wanted : program.inputs) {
    const GivenTensor& given = *called(inputs, wanted.name);
    require(given, wanted, false);
    buffers.push_back(given.data);
  }
  std::vector<const NamedTensor*> answers;
  for (const GivenTensor& given : outputs) {
    const auto at = std::find_if(program.outputs.begin(), program.outputs.end(), [&](const auto& one) { return one.name == given.name; });
    if (at == program.outputs.end())
      throw Unfit("no output has this name; got " + text_of(given) + "; wanted " + listed(program.outputs));
    if (given.type != static_cast<int>(at->type) || (given.shape && !fits(*at, given)))
      throw Unfit("an output has another type or shape; got " + text_of(given) + "; wanted " + text_of(*at));
    require(given, *at, true);
    answers.push_back(&*at);
  }
  for (const Constant& constant : file_.constants) buffers.push_back(constant.data);
  Arena arena = arena_of(program);
  buffers[0] = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(arena.get()) + 63) / 64 * 64);
  run_calls(program, buffers);
  for (size_t i = 0; i < answers.size(); i++) {
    const Placed& place = program.places[static_cast<size_t>(answers[i]->where)];
    copy(place.geometry.at(buffers[place.buffer] + place.offset), outputs[i].data);
  }
  if (program.arena <= kMostKept) keep(static_cast<size_t>(found - all.begin()), std::move(arena));
}

// The outputs are written by now: no memory for the list is no failure of the run.
void Model::keep(size_t program, Arena arena) noexcept {
  constexpr size_t most = 16;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& idle = idle_[program];
    if (idle.size() < most) idle.push_back(std::move(arena));
  } catch (...) {
  }
}

void Model::run_calls(const Program& program, const std::vector<char*>& buffers) const {
  const GivenThreads::Use use(given_.run ? &given_ : nullptr);
  std::vector<View> views;
  std::vector<Operand> operands;
  for (const ProgramCall& one : program.calls) {
    views.clear(), operands.clear();
    views.reserve(one.operands.size());  // operands point at them
    for (const int32_t index : one.operands) {
      Operand operand;
      if (index >= 0) {
        const Placed& place = program.places[static_cast<size_t>(index)];
        views.push_back(place.geometry.at(buffers[place.buffer] + place.offset));
        operand.described = &views.back();
      }
      operands.push_back(operand);
    }
    if (!one.call.run(operands.data(), threads_))
      throw Refusal{one.call.name + " was given a weight of another layout", "other bytes", "those of the call's kernel", ""};
  }
}

// Zeros, so that a program that reads what it did not write finds nothing of another run or of this process.
Model::Arena Model::arena_of(const Program& program) {
  const auto bytes = static_cast<size_t>(program.arena) + 64;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& idle = idle_[static_cast<size_t>(&program - file_.programs.data())];
    if (!idle.empty()) {
      Arena found = std::move(idle.back());  // the warmest
      idle.pop_back();
      std::memset(found.get(), 0, bytes);
      return found;
    }
  }
  Arena found(static_cast<char*>(std::calloc(bytes, 1)), std::free);
  if (!found) throw std::bad_alloc();
  return found;
}

}  // namespace twofour
