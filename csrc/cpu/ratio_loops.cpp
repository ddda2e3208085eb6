// Compiled once for each SIMD level: plain loops that the compiler turns into vectors of the level's width.
#include "ratio_loops.h"

namespace d3s {
namespace {

// Whether a token counts, as a word of all ones or of zeros. A bool that views other data may be any byte.
struct All {
  uint32_t operator()(int64_t) const { return ~0u; }
};
struct Masked {
  const uint8_t* flags;
  uint32_t operator()(int64_t i) const { return 0u - (flags[i] != 0); }
};
struct OfGroup {
  const int8_t* ids;
  int8_t group;
  uint32_t operator()(int64_t i) const { return 0u - (ids[i] == group); }
};
struct InSome {
  const int8_t* ids;
  uint32_t operator()(int64_t i) const { return 0u - (ids[i] >= 0); }
};
template <class A, class B>
struct Both {
  A a;
  B b;
  uint32_t operator()(int64_t i) const { return a(i) & b(i); }
};

// Calls body with one of the functors above: a token counts by the mask and, if there are groups, by `in_group`.
template <class InGroup, class Body>
void with_present(const TokenStretch& tokens, const InGroup& in_group, const Body& body) {
  const Masked masked = {reinterpret_cast<const uint8_t*>(tokens.mask)};
  if (tokens.ids && tokens.mask)
    body(Both<Masked, InGroup>{masked, in_group});
  else if (tokens.ids)
    body(in_group);
  else if (tokens.mask)
    body(masked);
  else
    body(All());
}

template <class Term, class Present>
void add_terms(const Term& term, const Present& present, int64_t n, ExactSum& sum) {
  uint64_t places = 0;
  uint32_t count = 0, largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = present(i), bits = bits_of_float(term(i)) & word;
    const uint32_t size = bits & 0x7fffffffu;  // as an integer, NaN is larger than any number
    largest = size > largest ? size : largest;
    places += placed_units(float_of_bits(bits));
    count += word & 1u;
  }
  if (largest < bits_of_float(kFarTerm)) {
    sum.units += static_cast<int64_t>(places - static_cast<uint64_t>(n) * bits_of_double(kUnitsOrigin));
    sum.count += count;
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    if (present(i)) add_term(sum, term(i));
}

void sum(const float* a, const float* b, const TokenStretch& tokens, int group, ExactSum& total) {
  with_present(tokens, OfGroup{tokens.ids, static_cast<int8_t>(group)}, [&](const auto& present) {
    if (b)
      add_terms([=](int64_t i) { return a[i] - b[i]; }, present, tokens.n, total);
    else
      add_terms([=](int64_t i) { return a[i]; }, present, tokens.n, total);
  });
}

void assign(const TokenStretch& tokens, int group, float number, float* out) {
  const uint32_t bits = bits_of_float(number);
  with_present(tokens, OfGroup{tokens.ids, static_cast<int8_t>(group)}, [&](const auto& present) {
    for (int64_t i = 0; i < tokens.n; ++i) {
      const uint32_t word = present(i);
      out[i] = float_of_bits((bits & word) | (bits_of_float(out[i]) & ~word));
    }
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
  with_present(tokens, InSome{tokens.ids}, [&](const auto& present) {
    if (means)
      write(present, [=](int64_t i) { return means[i] + (a[i] - b[i]); });
    else
      write(present, [=](int64_t i) { return a[i] - b[i]; });
  });
}

void gradients(const float* grad, const float* ratio, const TokenStretch& tokens, const RatioLimits& limits,
               float* out) {
  const RatioLimits within = limits;
  with_present(tokens, InSome{tokens.ids}, [&](const auto& present) {
    for (int64_t i = 0; i < tokens.n; ++i)
      out[i] = float_of_bits(bits_of_float(ratio_gradient(grad[i], ratio[i], within)) & present(i));
  });
}

}  // namespace

namespace D3S_LEVEL {
extern const RatioLoops ratio_loops = {sum, assign, exponentiate, gradients};
}

}  // namespace d3s
