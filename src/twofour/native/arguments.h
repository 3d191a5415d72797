// What native calls take beside the data of their operands, as bytes: a kind for each argument, a letter, and its value. What
// stands for a place in a table of this build is written by name.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bytes.h"
#include "operand.h"

namespace twofour {

// A whole number with a meaning of its own: Python passes it as an int.
struct NumberArgument {
  int value = 0;
  operator int() const { return value; }
};

// How many threads a call may use: who runs a program says so, so that it is not written.
struct Threads : NumberArgument {};

// How an argument is written and read again; `read` throws Malformed, or a Refusal of what this build or CPU lacks.
template <class T>
struct Argument;

inline void read_kind(ByteReader& from, char wanted) {
  if (from.number<char>() != wanted) throw Malformed("a call with other arguments than this library's");
}

template <class T, char kKind, class Stored>
struct PlainArgument {
  static void write(const T& value, ByteWriter& to) { to.number(kKind), to.number(static_cast<Stored>(value)); }
  static T read(ByteReader& from) {
    read_kind(from, kKind);
    return static_cast<T>(from.number<Stored>());
  }
};
template <>
struct Argument<int> : PlainArgument<int, 'i', int32_t> {};
template <>
struct Argument<int64_t> : PlainArgument<int64_t, 'l', int64_t> {};
template <>
struct Argument<float> : PlainArgument<float, 'f', float> {};
template <>
struct Argument<bool> : PlainArgument<bool, 'b', uint8_t> {};

template <>
struct Argument<Threads> {
  static void write(const Threads&, ByteWriter& to) { to.number('t'); }
  static Threads read(ByteReader& from) { return read_kind(from, 't'), Threads{{1}}; }
};

// Operands come from elsewhere: only that there is one is written.
template <>
struct Argument<Operand> {
  static void write(const Operand&, ByteWriter& to) { to.number('o'); }
  static Operand read(ByteReader& from) { return read_kind(from, 'o'), Operand{}; }
};
template <>
struct Argument<Answer> {
  static void write(const Answer&, ByteWriter& to) { to.number('a'); }
  static Answer read(ByteReader& from) { return read_kind(from, 'a'), Answer{}; }
};

template <class Many>
struct ManyArguments {
  using One = typename Many::value_type;
  static void write(const Many& all, ByteWriter& to) {
    to.number('['), to.number(static_cast<uint32_t>(all.size()));
    for (const One& one : all) Argument<One>::write(one, to);
  }
  static Many read(ByteReader& from) {
    read_kind(from, '[');
    Many all;
    const uint32_t count = from.count(1 << 12, 1, "arguments in a list");
    for (uint32_t i = 0; i < count; i++) all.push_back(Argument<One>::read(from));
    return all;
  }
};
template <class One>
struct Argument<std::vector<One>> : ManyArguments<std::vector<One>> {};
template <class One>
struct Argument<ListOf<One>> : ManyArguments<ListOf<One>> {};

template <class One, size_t kCount>
struct Argument<std::array<One, kCount>> {
  static void write(const std::array<One, kCount>& all, ByteWriter& to) {
    for (const One& one : all) Argument<One>::write(one, to);
  }
  static std::array<One, kCount> read(ByteReader& from) {
    std::array<One, kCount> all;
    for (One& one : all) one = Argument<One>::read(from);
    return all;
  }
};

template <class... Fields>
struct Argument<std::tuple<Fields...>> {
  static void write(const std::tuple<Fields...>& all, ByteWriter& to) {
    std::apply([&](const Fields&... one) { (Argument<Fields>::write(one, to), ...); }, all);
  }
  static std::tuple<Fields...> read(ByteReader& from) { return std::tuple<Fields...>{Argument<Fields>::read(from)...}; }
};
template <class First, class Second>
struct Argument<std::pair<First, Second>> {
  static void write(const std::pair<First, Second>& both, ByteWriter& to) {
    Argument<First>::write(both.first, to), Argument<Second>::write(both.second, to);
  }
  static std::pair<First, Second> read(ByteReader& from) {
    return std::pair<First, Second>{Argument<First>::read(from), Argument<Second>::read(from)};
  }
};
template <>
struct Argument<std::string> {
  static void write(const std::string& text, ByteWriter& to) { to.number('s'), to.text(text); }
  static std::string read(ByteReader& from) { return read_kind(from, 's'), from.text(); }
};

// A place in a table, -1 for none, by the name of what stands there; `Table`: a type with `name(place)` and `find(name)`,
// which throws a Refusal of what is not there.
template <class T, class Table>
struct NamedArgument {
  static void write(const T& place, ByteWriter& to) { to.number('k'), to.text(place < 0 ? "" : Table::name(place)); }
  static T read(ByteReader& from) {
    read_kind(from, 'k');
    const std::string name = from.text();
    return T{{name.empty() ? -1 : Table::find(name)}};
  }
};

[[noreturn]] inline void no_such_kernel(const std::string& name) {
  throw Refusal{"a program calls a kernel that this library does not have", name, "a kernel of its tables",
                "a library of the version and for the processor that the program was written with"};
}
[[noreturn]] inline void no_such_instructions(const char* name, const char* isa) {
  throw Refusal{std::string(name) + " cannot run on this CPU", "a CPU without " + std::string(isa), "one that has it",
                "choose a row that native.supports"};
}

}  // namespace twofour
