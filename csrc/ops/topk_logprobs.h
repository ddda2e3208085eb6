// The kernels that find the largest logits of rows, implemented in cpu/ and cuda/. ops/topk_logprobs.cpp has checked
// the arguments. Nothing here depends on torch.
#pragma once

#include "../core/topk_entry.h"
#include "logprob_entropy.h"

namespace d3s {

constexpr int64_t kMostBest = 1024;  // the maximum of k

// The entries of the k largest logits that each row has had so far: [rows][k], flipped, the largest first. Rows with
// fewer logits have kNoEntry at the end.
struct BestEntries {
  TopkEntry* flipped = nullptr;
  int64_t k = 0;
};

// Of the tile's logits and of the entries in `best`, leaves the k largest in `best`, for each row that is not masked
// out. Merges all other logits into the row's state, and so every NaN.
//
// Kernels take the slices of a row from left to right. Of each slice, they first merge the logits that stay outside of
// `best` into the state, then the entries that the slice has driven out of `best`. So a row's results are bitwise equal
// however the row is cut into tiles, as long as tiles are cut between slices.
void merge_topk_tile(const LogitsRows& rows, RowState* states, const BestEntries& best, Device& device);

}  // namespace d3s
