// Entries: a logit and its id as one integer, so that a row's largest logits are its largest integers.
#pragma once

#include "order_key.h"

namespace d3s {
namespace {  // internal linkage, like the order keys

// A larger logit has a larger entry. Of equal logits, the lower id has the larger entry. NaN has no entry.
using TopkEntry = uint64_t;
constexpr TopkEntry kNoEntry = 0;

D3S_HOST_DEVICE TopkEntry topk_entry(uint32_t key, int64_t id) {
  return static_cast<TopkEntry>(key) << 32 | ~static_cast<uint32_t>(id);
}
D3S_HOST_DEVICE uint32_t key_of(TopkEntry entry) { return static_cast<uint32_t>(entry >> 32); }
D3S_HOST_DEVICE int64_t id_of(TopkEntry entry) { return ~static_cast<uint32_t>(entry); }
D3S_HOST_DEVICE float logit_of(TopkEntry entry) { return order_key_value(key_of(entry)); }

// In tensors, entries are int64, so the highest bit is flipped: then signed integers have the same order. kNoEntry
// becomes INT64_MIN. The function is its own inverse.
D3S_HOST_DEVICE TopkEntry flipped(TopkEntry entry) { return entry ^ TopkEntry{1} << 63; }

}  // namespace
}  // namespace d3s
