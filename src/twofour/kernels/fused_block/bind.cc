// Fused blocks for Python: programs, checked once when they are made, and the call, whose operands give the domain.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fused_block.h"
#include "gathers.h"
#include "native/binding.h"
#include "native/caches.h"
#include "native/parallel.h"
#include "native/scratch.h"
#include "native/shared.h"

namespace twofour {
namespace {

constexpr BlockKernel kKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "fused_block", __VA_ARGS__}, symbol},
#include "fused_block.inc"
#undef TWOFOUR_ROW
};

enum class Kind { load, store, fill, unary, binary, ternary, reduce };
struct Named {
  const char *name, *kind_name;
  Kind kind;
};
constexpr Named kSteps[] = {
#define TWOFOUR_STEP(name, kind) {#name, #kind, Kind::kind},
#include "ops.def"
};
constexpr int kStepCount = static_cast<int>(std::size(kSteps));
constexpr int kMostAxes = 16;
constexpr Types kStored{Type::f32, Type::bf16, Type::boolean, Type::u8};

// Bytes of the operands of a call from which on its answers are written past the caches; tests set it. Of the last cache,
// 32 MB, others have a part: measured, 24 MB of operands gain a third, 16 MB nothing.
std::atomic<int64_t> streams_from{cache_bytes(3, int64_t{32} << 20) / 8 * 5};

[[noreturn]] void impossible(const std::string& what, const std::string& got, const std::string& wanted) {
  throw Refusal{"a fused block's program " + what, got, wanted, "build it with FusedBlock, which checks nothing away"};
}

// A program whose every step stays inside its registers and operands, whatever the operands are.
class Program {
 public:
  using Fields = std::tuple<std::string, int, int, int, int, float>;

  // What a program is made of: steps (name, to, a, b, c, value), loops (begin, end, whether of rows), which registers are
  // kept, registers of rows, inputs, outputs, gathers (table, its rows).
  using Source = std::tuple<std::vector<Fields>, std::vector<std::tuple<int, int, bool>>, std::vector<bool>, int, int, int,
                            std::vector<std::pair<int, int>>>;

  Program(const std::vector<Fields>& steps, const std::vector<std::tuple<int, int, bool>>& loops,
          const std::vector<bool>& kept, int row_registers, int inputs, int outputs, const std::vector<std::pair<int, int>>& gathers)
      : source_(steps, loops, kept, row_registers, inputs, outputs, gathers), registers_(static_cast<int>(kept.size())),
        row_registers_(row_registers), inputs_(inputs), outputs_(outputs) {
    const auto counted = [](const char* what, int count, int most) {
      if (count < 0 || count > most)
        impossible("has an impossible number of " + std::string(what), std::to_string(count), "0 to " + std::to_string(most));
    };
    counted("registers", registers_, kMostRegisters);
    counted("row registers", row_registers, kMostRegisters);
    counted("operands", inputs + outputs, kMostOperands);
    counted("inputs", inputs, kMostOperands);
    counted("outputs", outputs, kMostOperands);
    for (int i = 0; i < registers_; i++) kept_[i] = kept[static_cast<size_t>(i)];
    for (const auto& [table, rows] : gathers)
      if (!gathers_.add(table, rows, inputs))
        impossible("gathers rows of what is no input of its own", std::to_string(table), "an input, and a later one");
    reduces_ = !gathers.empty();  // a row is then the last axis and nothing else
    int next = 0;
    for (const auto& [begin, end, rows] : loops) {
      if (begin != next || end < begin || end > static_cast<int>(steps.size()))
        impossible("has loops that do not follow each other", std::to_string(begin), std::to_string(next));
      next = end;
      loops_.push_back({begin, end, rows});
      for (int i = begin; i < end; i++) steps_.push_back(checked(steps[static_cast<size_t>(i)], rows));
    }
    for (const Loop& loop : loops_)
      if (loop.rows) reduces_ = true;  // a row is then the last axis, whatever its size
      else join(loop);
    if (next != static_cast<int>(steps.size())) impossible("has steps outside its loops", std::to_string(next), "all");
    require_written();
    if (loops_.size() > 1) reduces_ = true;
    written_.resize(static_cast<size_t>(outputs), 0);
    for (const Loop& loop : loops_)
      for (int i = loop.begin; i < loop.end; i++)
        if (steps_[static_cast<size_t>(i)].op == StepOp::store)
          written_[static_cast<size_t>(steps_[static_cast<size_t>(i)].to)] |= loop.rows ? 1 : 2;
    for (const int how : written_)
      if (how != 1 && how != 2) impossible("writes an output not at all, or once a row and once a place", "", "one of them");
  }

  const Source& source() const { return source_; }

  void run(int index, const Operands& inputs, const Answers& outputs, int threads) const {
    const BlockKernel& kernel = row(kKernels, index);
    const Border border("a fused block");
    std::vector<View> views;
    const auto read = [&](const auto& given, int count, const char* role) {
      if (static_cast<int>(given.size()) != count)
        throw Refusal{"a fused block is given another number of operands", std::to_string(given.size()) + " " + role + "s",
                      std::to_string(count), "pass those it was built for"};
      for (const Operand& one : given)
        views.push_back(border.strided(one, role, gathers_.chooses(static_cast<int>(views.size())) ? Types{Type::s64} : kStored));
    };
    read(inputs, inputs_, "input");
    read(outputs, outputs_, "output");
    const std::vector<View> given = views;
    const std::vector<std::vector<int64_t>> of_tables = gathers_.spread(border, inputs, views);
    Domain domain = merged(views, inputs, outputs);
    gathers_.point(given, domain.operands);
    if (domain.block.rows == 0) return;
    if (domain.block.width == 0) {
      if (!reduces_) return;
      throw Refusal{"a fused block reduces rows without values", "a last axis of 0", "at least 1", "run its operators one by one"};
    }
    Block& block = domain.block;
    block.inputs = domain.operands.data();
    block.outputs = domain.operands.data() + inputs_;
    block.input_count = inputs_;
    block.streams = exceed_caches(views);
    block.reads_ahead = block.streams && reads_in_bursts();
    const Unlocked unlocked;
    const int64_t places = block.tile_rows * (reduces_ ? block.width : block.tile_width);
    const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, places));
    const int64_t each = block.padded(block.scratch());
    const int64_t members = threads > 1 && block.units() > grain ? threads : 1;
    static Scratch scratch;  // taken here: a thread of the team cannot say that there is no memory
    const Scratch::Lease lease(scratch, static_cast<size_t>(each * members) * sizeof(float));
    std::atomic<int64_t> next{0};
    parallel_for(block.units(), grain, threads, [&](int64_t begin, int64_t end) {
      kernel.run(block, static_cast<float*>(lease.data()) + each * next.fetch_add(1), begin, end);
    });
  }

 private:
  struct Domain {
    Block block{};
    std::vector<BlockOperand> operands;
  };

  // Whether the operands exceed the caches, which answers would then only push each other out of.
  static bool exceed_caches(const std::vector<View>& views) {
    int64_t bytes = 0;
    for (const View& view : views) {
      int64_t count = view.width;
      for (int a = 0; a < view.ndim; a++) count *= view.strides[a] != 0 ? view.shape[a] : 1;
      bytes += count;
    }
    return bytes > streams_from;
  }

  // Whether memory would be idle at times: there are several loops over a tile, of which the first reads, or a pass of
  // one that reads no input.
  bool reads_in_bursts() const {
    if (std::count_if(loops_.begin(), loops_.end(), [](const Loop& loop) { return !loop.rows; }) > 1) return true;
    for (const Loop& loop : loops_) {
      for (int i = loop.begin; loop.rows && i < loop.end; i++)
        if (steps_[static_cast<size_t>(i)].op == StepOp::load) return true;
      bool input[kMostRegisters] = {};
      for (int i = loop.begin; !loop.rows && i < loop.end;) {
        const Step& first = steps_[static_cast<size_t>(i)];
        bool reads_input = first.op == StepOp::load || first.op == StepOp::store;
        for (const int end = i + first.chain; i < end; i++) {
          const Step& step = steps_[static_cast<size_t>(i)];
          for (int k = 0; k < registers_; k++) reads_input |= input[k] && reads(step, k);
          if (step.op != StepOp::store && step.to < kRowRegister) input[step.to] = step.op == StepOp::load;
        }
        if (!reads_input) return true;
      }
    }
    return false;
  }

  // Steps that take what the one before them makes run together: those of links.def, then at most one reduction.
  void join(const Loop& loop) {
    for (int i = loop.begin; i + 1 < loop.end; i++) at(i).lasts = lasts(loop, i);
    for (int i = loop.begin; i < loop.end;) {
      int end = i + 1;
      while (end < loop.end && end - i < kMostChain && hands_on(i, end)) {
        if (is(at(end++), Kind::reduce)) break;
      }
      at(i).chain = static_cast<int16_t>(end - i);
      i = end;
    }
  }
  // Whether the chain from `first` on can take up step i.
  bool hands_on(int first, int i) {
    const Step &step = at(i - 1), &next = at(i);
    if (!links(step.op) || next.a != step.to || !(links(next.op) || is(next, Kind::reduce))) return false;
    for (int k = first; k < i; k++)
      if (reads_beside(next, at(k).to)) return false;  // what the chain writes stands in memory only behind it
    return true;
  }
  // Whether another than the next step reads what step i makes.
  bool lasts(const Loop& loop, int i) {
    const Step &step = at(i), &next = at(i + 1);
    if (step.op == StepOp::store || step.to >= kRowRegister) return false;
    if (kept_[step.to]) return true;
    if (next.op != StepOp::store && next.to == step.to) return false;
    for (int later = i + 2; later < loop.end; later++) {
      if (reads(at(later), step.to)) return true;
      if (at(later).op != StepOp::store && at(later).to == step.to) return false;
    }
    return false;
  }
  static bool is(const Step& step, Kind kind) { return kSteps[static_cast<int>(step.op)].kind == kind; }
  static bool links(StepOp op) {
    switch (op) {
#define TWOFOUR_LINK(name, result) case StepOp::name:
#include "links.def"
        return true;
      default:
        return false;
    }
  }
  static bool reads_beside(const Step& step, int i) {
    const Kind kind = kSteps[static_cast<int>(step.op)].kind;
    return (kind == Kind::binary && step.b == i) || (kind == Kind::ternary && (step.b == i || step.c == i));
  }
  static bool reads(const Step& step, int i) {
    const Kind kind = kSteps[static_cast<int>(step.op)].kind;
    return (kind != Kind::load && kind != Kind::fill && step.a == i) || reads_beside(step, i);
  }
  Step& at(int i) { return steps_[static_cast<size_t>(i)]; }

  // Refuses a program that reads a register before it writes it: scratch holds what other calls have left there. A later loop
  // finds registers that are kept, and what earlier ones summed up of rows.
  void require_written() const {
    std::vector<bool> tile(kMostRegisters), of_rows(kMostRegisters);
    for (const Loop& loop : loops_) {
      for (int i = 0; i < registers_; i++) tile[static_cast<size_t>(i)] = tile[static_cast<size_t>(i)] && kept_[i];
      std::vector<bool> after = of_rows;
      for (int i = loop.begin; i < loop.end; i++) {
        const Step& step = steps_[static_cast<size_t>(i)];
        const Kind kind = kSteps[static_cast<int>(step.op)].kind;
        const auto needs = [&](int from) {
          if (from == kNumber || (from < kRowRegister ? tile[static_cast<size_t>(from)] : of_rows[static_cast<size_t>(from - kRowRegister)])) return;
          impossible("reads a register that it has not written", std::string(kSteps[static_cast<int>(step.op)].name) + ": " + std::to_string(from),
                     "one that a step before it writes");
        };
        if (kind != Kind::load && kind != Kind::fill) needs(step.a);
        if (kind == Kind::binary || kind == Kind::ternary) needs(step.b);
        if (kind == Kind::ternary) needs(step.c);
        if (kind == Kind::reduce) after[static_cast<size_t>(step.to - kRowRegister)] = true;  // whole when the loop has ended
        else if (kind == Kind::store) continue;
        else if (loop.rows) of_rows[static_cast<size_t>(step.to - kRowRegister)] = after[static_cast<size_t>(step.to - kRowRegister)] = true;
        else tile[static_cast<size_t>(step.to)] = true;
      }
      of_rows = after;
    }
  }

  Step checked(const Fields& fields, bool rows) {
    const auto& [name, to, a, b, c, value] = fields;
    int op = 0;
    while (op < kStepCount && name != kSteps[op].name) op++;
    if (op == kStepCount) impossible("has an unknown step", name, "a name of native.extension().block_steps");
    const auto needs = [&](bool fits, const char* role, int got) {
      if (!fits) impossible("has a step that reads or writes what is not there", name + ": " + role + " " + std::to_string(got), "");
    };
    const auto tile = [&](int i) { return !rows && i >= 0 && i < registers_; };
    const auto of_row = [&](int i) { return i >= kRowRegister && i < kRowRegister + row_registers_; };
    const auto own = [&](int i) { return rows ? of_row(i) : tile(i); };
    switch (kSteps[op].kind) {
      case Kind::load:
        needs(own(to), "to", to), needs(a >= 0 && a < inputs_ && !gathers_.chooses(a) && !(rows && gathers_.rows_of(a)), "input", a);
        if (rows) of_rows_[a] = true;
        break;
      case Kind::store:
        needs(to >= 0 && to < outputs_, "output", to), needs(own(a), "from", a);
        break;
      case Kind::fill:
        needs(own(to), "to", to);
        break;
      case Kind::unary:
        needs(own(to), "to", to), needs(own(a), "a", a);
        if (name == "over_width") reduces_ = true;  // a row is then the last axis and nothing else
        break;
      case Kind::binary:
        needs(own(to), "to", to), needs(own(a), "a", a), needs(b == kNumber || own(b) || of_row(b), "b", b);
        needs(!of_row(b) || rows || to != a, "to (the first operand beside a row register)", to);
        break;
      case Kind::ternary:
        needs(own(to), "to", to), needs(own(a), "a", a), needs(own(b), "b", b), needs(own(c), "c", c);
        break;
      case Kind::reduce:
        needs(!rows && of_row(to), "to", to), needs(tile(a), "a", a);
        reduces_ = true;
        break;
    }
    return {static_cast<StepOp>(op), static_cast<int16_t>(to), static_cast<int16_t>(a), static_cast<int16_t>(b),
            static_cast<int16_t>(c), value};
  }

  // As many as fill 8 KB of the widest operand that has a number for each place.
  static int64_t places_of_tile(const std::vector<View>& views) {
    const bool narrow = std::all_of(views.begin(), views.end(), [](const View& view) {
      return view.type == Type::bf16 || view.ndim == 0 || view.shape[view.ndim - 1] == 1;
    });
    return narrow ? kMostTile : kTile;
  }

  // Places of a domain: inputs whose numbers are repeated may stand for any number of them, where no output holds them all.
  static int64_t multiplied(int64_t a, int64_t b) {
    constexpr int64_t most = int64_t{1} << 40;
    int64_t all;
    if (__builtin_mul_overflow(a, b, &all) || all > most)
      throw Refusal{"a fused block runs over too many places", std::to_string(a) + " x " + std::to_string(b),
                    std::to_string(most) + " at most", "pass fewer rows"};
    return all;
  }

  // The shape that all operands have or are broadcast to, its axes merged, and each operand's strides over it.
  Domain merged(const std::vector<View>& views, const Operands& inputs, const Answers& outputs) const {
    const Border border("a fused block");
    const auto handle = [&](size_t i) {
      const auto n = static_cast<size_t>(inputs_);
      return i < n ? inputs[i] : outputs[i - n];
    };
    int ndim = 0;
    for (const View& view : views) ndim = std::max(ndim, view.ndim);
    std::vector<int64_t> sizes(static_cast<size_t>(ndim), 1);
    for (size_t i = 0; i < views.size(); i++) {
      border.require(views[i].ndim <= kMostAxes, handle(i), "operand", "at most 16 axes");
      for (int a = 0; a < views[i].ndim; a++) {
        int64_t& size = sizes[static_cast<size_t>(ndim - views[i].ndim + a)];
        const int64_t mine = views[i].shape[a];
        border.require(mine == 1 || size == 1 || mine == size, handle(i), "operand", "a shape that is broadcast to the others'");
        if (mine != 1) size = mine;
      }
    }
    std::vector<std::vector<int64_t>> strides(views.size(), std::vector<int64_t>(static_cast<size_t>(ndim), 0));
    for (size_t i = 0; i < views.size(); i++)
      for (int a = 0; a < views[i].ndim; a++)
        if (views[i].shape[a] != 1) strides[i][static_cast<size_t>(ndim - views[i].ndim + a)] = views[i].strides[a];
    for (size_t i = 0; i < static_cast<size_t>(inputs_); i++)
      border.require(!of_rows_[i] || ndim == 0 || strides[i].back() == 0, handle(i), "input", "one number a row");
    for (size_t i = static_cast<size_t>(inputs_); i < views.size(); i++) {
      const bool per_row = written_[i - static_cast<size_t>(inputs_)] == 1;
      for (int a = 0; a < ndim; a++) {
        const bool row = a == ndim - 1 && per_row;
        const bool whole = strides[i][static_cast<size_t>(a)] != 0 || sizes[static_cast<size_t>(a)] <= 1;
        border.require(row ? strides[i][static_cast<size_t>(a)] == 0 : whole, handle(i), "output",
                       row ? "one number a row" : "a number of its own for each place");
      }
    }
    // Axes in the order of the first output's memory, but for the one that is reduced; then merged from the last on.
    std::vector<size_t> order;
    for (size_t a = 0; a < static_cast<size_t>(ndim); a++)
      if (sizes[a] != 1 || (reduces_ && a + 1 == static_cast<size_t>(ndim))) order.push_back(a);
    if (order.empty()) {
      sizes.push_back(1);
      for (auto& one : strides) one.push_back(0);
      order.push_back(sizes.size() - 1);
    }
    const auto& lead = strides[std::min(static_cast<size_t>(inputs_), views.size() - 1)];
    if (outputs_ > 0)
      std::stable_sort(order.begin(), order.end() - (reduces_ ? 1 : 0), [&](size_t a, size_t b) { return lead[a] > lead[b]; });
    std::vector<size_t> axes;  // each the last of those merged into it
    std::vector<int64_t> counts;
    for (const size_t a : order) {
      const bool apart = axes.empty() || (reduces_ && a == order.back()) ||
                         !std::all_of(strides.begin(), strides.end(), [&](const auto& one) {
                           return one[axes.back()] == one[a] * sizes[a];
                         });
      if (apart) axes.push_back(a), counts.push_back(sizes[a]);
      else axes.back() = a, counts.back() = multiplied(counts.back(), sizes[a]);
    }
    Domain domain;
    Block& block = domain.block;
    block.axes = static_cast<int>(axes.size()) - 1;
    if (block.axes > kOuterAxes)
      throw Refusal{"the operands of a fused block lie too differently", std::to_string(axes.size()) + " axes",
                    std::to_string(kOuterAxes + 1) + " that no operand has in one piece", "copy some: x.contiguous()"};
    block.rows = 1;
    for (int a = 0; a < block.axes; a++) block.rows = multiplied(block.rows, block.sizes[a] = counts[static_cast<size_t>(a)]);
    block.width = counts.back();
    const int64_t tile = places_of_tile(views);
    block.tile_width = std::max<int64_t>(1, std::min(block.width, tile));
    block.tile_rows = std::max<int64_t>(1, std::min(block.rows, block.width < tile ? tile / std::max<int64_t>(1, block.width) : 1));
    block.steps = steps_.data(), block.loops = loops_.data(), block.kept = kept_;
    block.loop_count = static_cast<int>(loops_.size()), block.registers = registers_, block.row_registers = row_registers_;
    block.reduces = reduces_;
    for (size_t i = 0; i < views.size(); i++) {
      BlockOperand operand{views[i].data, views[i].type, {}, strides[i][axes.back()]};
      for (int a = 0; a < block.axes; a++) operand.strides[a] = strides[i][axes[static_cast<size_t>(a)]];
      domain.operands.push_back(operand);
    }
    return domain;
  }

  Source source_;
  std::vector<Step> steps_;
  std::vector<Loop> loops_;
  bool kept_[kMostRegisters] = {}, of_rows_[kMostOperands] = {};  // inputs that have one number a row
  Gathers gathers_;
  int registers_, row_registers_, inputs_, outputs_;
  bool reduces_ = false;
  std::vector<int> written_;
};

// A program as Python and recorded calls hold it.
struct BlockProgram {
  Shared<Program> program;
};

}  // namespace

template <>
struct Argument<BlockProgram> {
  static void write(const BlockProgram& held, ByteWriter& to) { Argument<Program::Source>::write(held.program->source(), to); }
  static BlockProgram read(ByteReader& from) {
    const Program::Source source = Argument<Program::Source>::read(from);
    if (std::get<5>(source) == 0) throw Malformed("a fused block that writes nothing");
    return std::apply([](const auto&... part) { return BlockProgram{Shared<Program>::make(part...)}; }, source);
  }
};

void bind_fused_block(nb::module_& m) {
  bind_table(m, kKernels);
  nb::list steps;
  for (const Named& step : kSteps) steps.append(nb::make_tuple(step.name, step.kind_name));
  m.attr("block_steps") = steps;
  nb::list links;
#define TWOFOUR_LINK(name, result) links.append(#name);
#include "links.def"
  m.attr("block_links") = links;
  m.attr("block_row_register") = kRowRegister;
  m.attr("block_number") = kNumber;
  m.def("block_streams_from", [](int64_t bytes) { return streams_from.exchange(bytes); });
  nb::class_<BlockProgram> bound(m, "BlockProgram");
  bound.def("__init__", [](BlockProgram* self, const std::vector<Program::Fields>& steps,
                           const std::vector<std::tuple<int, int, bool>>& loops, const std::vector<bool>& kept, int row_registers,
                           int inputs, int outputs, const std::vector<std::pair<int, int>>& gathers) {
    new (self) BlockProgram{Shared<Program>::make(steps, loops, kept, row_registers, inputs, outputs, gathers)};
  });
  bind_call(bound, "run", +[](const BlockProgram& self, RowOf<BlockKernel> index, const Operands& inputs,
                              const Answers& outputs, Threads threads) { self.program->run(index, inputs, outputs, threads); },
            "fused_block");
}

}  // namespace twofour
