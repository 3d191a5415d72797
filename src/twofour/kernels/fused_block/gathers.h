// Tables of which a fused block reads rows that another input chooses (an embedding): checked, and seen as the domain does.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "fused_block.h"
#include "native/binding.h"

namespace twofour {

class Gathers {
 public:
  // The input `rows` says which row of the input `table` each row of the domain reads. False: they are no such inputs.
  bool add(int table, int rows, int inputs) {
    const bool fits = table >= 0 && rows > table && rows < inputs && !chooses_[table] && !rows_of_[table] && !rows_of_[rows];
    if (fits) rows_of_[table] = rows, chooses_[rows] = true;
    return fits;
  }
  // Whether an operand chooses rows; what chooses the rows of a table, 0: nothing.
  bool chooses(int i) const { return i < kMostOperands && chooses_[i]; }
  int rows_of(int i) const { return rows_of_[i]; }

  // Gives tables the shape of the numbers that choose their rows, and a row. Returns what holds those shapes.
  std::vector<std::vector<int64_t>> spread(const Border& border, const Operands& inputs, std::vector<View>& views) const {
    std::vector<std::vector<int64_t>> held;
    for (size_t i = 0; i < inputs.size(); i++) {
      if (!rows_of_[i]) continue;
      View& table = views[i];
      const View& rows = views[static_cast<size_t>(rows_of_[i])];
      const Operand& chosen = inputs[static_cast<size_t>(rows_of_[i])];
      border.require(table.ndim == 2, inputs[i], "table", "two axes");
      border.require(rows.ndim > 0 && rows.ndim <= kMostIndex && rows.shape[rows.ndim - 1] == 1, chosen, "rows of a table",
                     "a last axis of 1, of 16 at most");
      require_rows(rows, table.shape[0]);
      std::vector<int64_t> shape(rows.shape, rows.shape + rows.ndim), strides(rows.strides, rows.strides + rows.ndim);
      shape.back() = table.shape[1], strides.back() = table.strides[1];
      held.push_back(std::move(shape)), held.push_back(std::move(strides));
      table.ndim = rows.ndim, table.shape = held[held.size() - 2].data(), table.strides = held.back().data();
    }
    return held;
  }

  // Points operands at the rows they read, by the views as they were given.
  void point(const std::vector<View>& given, std::vector<BlockOperand>& operands) const {
    for (size_t i = 0; i < operands.size() && i < static_cast<size_t>(kMostOperands); i++) {
      if (!rows_of_[i]) continue;
      operands[i].rows = reinterpret_cast<const int64_t*>(given[static_cast<size_t>(rows_of_[i])].data);
      operands[i].table_row = given[i].strides[0];
    }
  }

 private:
  static constexpr int kMostIndex = 16;

  static void require_rows(const View& rows, int64_t count) {
    const auto* numbers = reinterpret_cast<const int64_t*>(rows.data);
    int64_t index[kMostIndex] = {}, at = 0;
    for (int64_t left = rows.count(); left > 0; left--) {
      if (numbers[at] < 0 || numbers[at] >= count)
        throw Refusal{"a fused block is asked for a row that its table has not", std::to_string(numbers[at]),
                      "0 to " + std::to_string(count - 1), "pass numbers of rows of the table"};
      for (int a = rows.ndim - 1; a >= 0; a--) {
        if (index[a] + 1 < rows.shape[a]) {
          index[a]++, at += rows.strides[a];
          break;
        }
        at -= index[a] * rows.strides[a];
        index[a] = 0;
      }
    }
  }

  int rows_of_[kMostOperands] = {};
  bool chooses_[kMostOperands] = {};
};

}  // namespace twofour
