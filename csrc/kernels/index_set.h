// What DReSS does to a selected set of rows or columns: the penalty with its gradient, its proximal steps and the
// multiplicative shrink; and the importance of rows or columns. The definitions, NaN and infinity included, are the
// reference.py files of group_penalty, group_prox, shrink and group_importance.
#pragma once

#include <cstdint>
#include <vector>

#include "storage.h"

namespace pyprune {

// The rows or columns of a rows x cols row-major matrix that `index` names, each at most once. `offset` is added to
// every weight first (1 for norms that multiply by 1 + w), and taken off again where weights are written.
struct Selection {
  std::int64_t rows;
  std::int64_t cols;
  bool by_row;
  const std::int64_t* index;
  std::int64_t count;
  float offset;
  DType dtype;
  int threads;
};

// Returns the sum over the selected groups of their l2 norm, or with l1 of their absolute values. If grad is not null,
// adds penalty_weight times the gradient of that to it. w and grad: disjoint, of one shape and dtype.
double group_penalty(const void* w, void* grad, double penalty_weight, bool l1, const Selection& selection);

// The sum of squares of each selected group.
std::vector<double> group_squares(const void* w, const Selection& selection);

// The proximal step of threshold times the same sum, in place.
void group_prox(void* w, double threshold, bool l1, const Selection& selection);

// The factor of a group in the gradient of penalty_weight times its l2 norm, of its sum of squares. A zero group has gradient
// zero; a NaN norm fails the comparisons and spreads over its group; a norm so small that the quotient has no float32
// takes the largest one.
float slope_scale(double sum, double penalty_weight);

// w *= factor on the selection; a factor of 0 writes +0.
void shrink(void* w, float factor, const Selection& selection);

// For each selected group the sum over its elements of |score * w|; signed: of score * w.
std::vector<double> group_importance(const void* score, const void* w, bool is_signed, const Selection& selection);

}  // namespace pyprune
