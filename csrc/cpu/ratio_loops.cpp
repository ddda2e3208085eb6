// This file is compiled once for each SIMD level. The compiler vectorises the loops for the level's vector width.
#include "ratio_loops.h"

#include <type_traits>

namespace d3s {
namespace {

// These functors return a word of all ones if token i is present, and a word of all zeros if not. A byte of the mask
// may have any value, since a bool tensor may be a view of other data.
struct All {
  uint32_t operator()(int64_t) const { return ~0u; }
};
struct Masked {
  const uint8_t* flags;
  uint32_t operator()(int64_t i) const { return 0u - (flags[i] != 0); }
};
struct InSome {
  const int8_t* ids;
  uint32_t operator()(int64_t i) const { return 0u - (ids[i] >= 0); }
};
struct MaskedInSome {
  Masked masked;
  InSome in_some;
  uint32_t operator()(int64_t i) const { return masked(i) & in_some(i); }
};

// These functors return the group of token i, or a number below 0 if the token is in no group.
struct OneGroup {
  int32_t operator()(int64_t) const { return 0; }
};
struct GroupId {
  const int8_t* ids;
  int32_t operator()(int64_t i) const { return ids[i]; }
};

// Calls body(present) with the functor that tests whether a token is unmasked and, if there are ids, in a group.
template <class Body>
void with_present(const TokenStretch& tokens, const Body& body) {
  const Masked masked = {reinterpret_cast<const uint8_t*>(tokens.mask)};
  const InSome in_some = {tokens.ids};
  if (tokens.ids && tokens.mask)
    body(MaskedInSome{masked, in_some});
  else if (tokens.ids)
    body(in_some);
  else if (tokens.mask)
    body(masked);
  else
    body(All());
}

// Calls body(group, present) with two of the functors above. Here, `present` tests only the mask.
template <class Body>
void with_groups(const TokenStretch& tokens, const Body& body) {
  const Masked masked = {reinterpret_cast<const uint8_t*>(tokens.mask)};
  if (tokens.ids && tokens.mask)
    body(GroupId{tokens.ids}, masked);
  else if (tokens.ids)
    body(GroupId{tokens.ids}, All());
  else if (tokens.mask)
    body(OneGroup(), masked);
  else
    body(OneGroup(), All());
}

// Calls body(first, number) for pairs of groups: groups `first` and `first` + 1, with `number` = 2. If the number of
// groups is odd, the last call is for one group, with `number` = 1.
template <class Body>
void in_pairs(int groups, const Body& body) {
  int group = 0;
  for (; group + 2 <= groups; group += 2) body(group, std::integral_constant<int, 2>());
  if (group < groups) body(group, std::integral_constant<int, 1>());
}

template <int kGroups, class Term, class Group, class Present>
void add_terms(const Term& term, const Group& group, const Present& present, int first, int64_t n, ExactSum* sums) {
  uint64_t places[kGroups] = {};
  uint32_t counts[kGroups] = {}, largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t all = bits_of_float(term(i)), counted = present(i);
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t word = counted & (0u - static_cast<uint32_t>(group(i) == first + g)), bits = all & word;
      const uint32_t size = bits & 0x7fffffffu;  // as an integer, NaN is larger than any other value
      largest = size > largest ? size : largest;
      places[g] += placed_units(float_of_bits(bits));
      counts[g] += word & 1u;
    }
  }
  if (largest < bits_of_float(kFarTerm)) {
    for (int g = 0; g < kGroups; ++g) {
      sums[g].units += static_cast<int64_t>(places[g] - static_cast<uint64_t>(n) * bits_of_double(kUnitsOrigin));
      sums[g].count += counts[g];
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const int g = group(i) - first;
    if (present(i) && g >= 0 && g < kGroups) add_term(sums[g], term(i));
  }
}

void sum(const float* a, const float* b, const TokenStretch& tokens, int groups, ExactSum* sums) {
  with_groups(tokens, [&](const auto& group, const auto& present) {
    in_pairs(groups, [&](int first, auto number) {
      const auto add = [&](const auto& term) {
        add_terms<decltype(number)::value>(term, group, present, first, tokens.n, sums + first);
      };
      if (b)
        add([=](int64_t i) { return a[i] - b[i]; });
      else
        add([=](int64_t i) { return a[i]; });
    });
  });
}

void assign(const TokenStretch& tokens, int groups, const float* numbers, float none, float* out) {
  with_groups(tokens, [&](const auto& group, const auto& present) {
    in_pairs(groups, [&](int first, auto number) {
      constexpr int kGroups = decltype(number)::value;
      uint32_t own[kGroups];
      for (int g = 0; g < kGroups; ++g) own[g] = bits_of_float(numbers[first + g]);
      const auto write = [&](const auto& other) {
        for (int64_t i = 0; i < tokens.n; ++i) {
          const uint32_t counted = present(i);
          uint32_t bits = other(i);
          for (int g = 0; g < kGroups; ++g) {
            const uint32_t word = counted & (0u - static_cast<uint32_t>(group(i) == first + g));
            bits = (own[g] & word) | (bits & ~word);
          }
          out[i] = float_of_bits(bits);
        }
      };
      if (first == 0)
        write([bits = bits_of_float(none)](int64_t) { return bits; });
      else
        write([=](int64_t i) { return bits_of_float(out[i]); });
    });
  });
}

void exponentiate(const float* a, const float* b, const TokenStretch& tokens, const float* means,
                  const LogBounds& bounds, float* out) {
  const LogBounds within = bounds;
  const uint32_t none = bits_of_float(kNoRatio);
  const auto write = [&](const auto& present, const auto& log_ratio) {
    for (int64_t i = 0; i < tokens.n; ++i) {
      const uint32_t word = present(i);
      const float ratio = bounded_ratio(log_ratio(i), within);
      out[i] = float_of_bits((bits_of_float(ratio) & word) | (none & ~word));
    }
  };
  with_present(tokens, [&](const auto& present) {
    if (means)
      write(present, [=](int64_t i) { return means[i] + (a[i] - b[i]); });
    else
      write(present, [=](int64_t i) { return a[i] - b[i]; });
  });
}

void gradients(const float* grad, const float* ratio, const TokenStretch& tokens, const RatioLimits& limits,
               float* out) {
  const RatioLimits within = limits;
  with_present(tokens, [&](const auto& present) {
    for (int64_t i = 0; i < tokens.n; ++i)
      out[i] = float_of_bits(bits_of_float(ratio_gradient(grad[i], ratio[i], within)) & present(i));
  });
}

}  // namespace

namespace D3S_LEVEL {
extern const RatioLoops ratio_loops = {sum, assign, exponentiate, gradients};
}

}  // namespace d3s
