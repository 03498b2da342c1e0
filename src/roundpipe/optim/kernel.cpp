// One parameter's update in one pass over memory, by any number of threads.
//
// An element is read, updated and written once: gradient in (fp32, bf16, fp16), state in place,
// working weights out. The work goes in blocks of 256 elements. A block's operands are widened to
// fp32 in the first-level cache (those that are fp32 are used where they lie), the rule runs on
// fp32 alone, the results are narrowed. So forms of state and rules do not multiply.
//
// Bits. Every element goes through the same operations wherever it lies: fused multiply-adds are
// written out and the compiler may form no others (-ffp-contract=off), so that neither the
// number of threads, nor a cut, nor a vector's tail changes a bit. Only 8-bit moments know
// neighbours: the largest of their block.
//
// Whoever changes this file changes the same rules in plain PyTorch: `chunks.py` and `state.py`.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kBlock = 256;      // elements that share the scale of 8-bit moments
constexpr int64_t kPiece = 1 << 16;  // elements that a thread takes at a time

enum Float : int32_t { kNone = 0, kFp32 = 1, kBf16 = 2, kFp16 = 3 };
enum Form : int32_t { kWide = 0, kHalf = 1, kByte = 2 };
enum Rule : int32_t { kAdam = 0, kSgd = 1 };

}  // namespace

extern "C" {

// The same fields in the same order as `Update` in compiled.py.
struct Update {
  int64_t numel;
  void* param;           // fp32, or the high halves of fp32 values rounded to nearest (bf16)
  uint16_t* remainder;   // their low halves; null for fp32
  const void* grad;
  void* first;           // the first moment, or SGD's momentum; may be null for SGD
  float* first_scale;    // one a block, for 8-bit moments
  void* second;          // the second moment, null for SGD
  float* second_scale;
  void* out;             // working weights; may be null
  int32_t grad_float;    // enum Float
  int32_t out_float;     // enum Float
  int32_t form;          // enum Form, of the moments
  int32_t rule;          // enum Rule
  int32_t threads;
  int32_t is_scaled;     // whether the gradient is multiplied by grad_scale
  float grad_scale;
  uint32_t draw;         // changes the draws of stochastic rounding from step to step
  float l2;              // times the parameter, added to the gradient
  float decay;           // Adam: the parameter is multiplied by it first
  float first_weight;    // Adam: 1 - beta1; SGD: momentum
  float second_keep;     // Adam: beta2; SGD: 1 - dampening
  float second_weight;   // Adam: 1 - beta2
  float root_correction; // Adam: the root of 1 - beta2^step
  float eps;
  float step_size;       // negative
  int32_t is_nesterov;   // SGD
  int32_t is_first;      // SGD: the momentum starts as the gradient
};

}  // extern "C"

namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;  // without the instruction it would be a call for each element
#endif
}

// ---- 16-bit floats

inline float of_bf16(uint16_t x) { return of_bits(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_bf16(float x) {  // to nearest, ties to even
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7FC0u : rounded);
}

inline float of_fp16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t rest = x & 0x7FFFu;
  const uint32_t normal = (rest << 13) + (112u << 23);
  const uint32_t special = (rest << 13) | 0x7F800000u;
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  const uint32_t finite = rest < 0x400u ? small : normal;
  return of_bits(sign | (rest >= 0x7C00u ? special : finite));
}

inline uint16_t to_fp16(float x) {  // to nearest, ties to even
  const uint32_t bits = bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7FFFFFFFu;
  const uint32_t normal = (rest + 0xFFFu + ((rest >> 13) & 1u) - (112u << 23)) >> 13;
  // Adding 2^23 to a multiple of 2^-24 scaled to whole numbers rounds it to one.
  const uint32_t small = bits_of(of_bits(rest) * 0x1p24f + 0x1p23f) - bits_of(0x1p23f);
  const uint32_t finite = rest < (113u << 23) ? small : normal;
  const uint32_t large = rest > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return static_cast<uint16_t>(sign | (rest >= (143u << 23) - 0x1000u ? large : finite));
}

// ---- 8-bit moments: small floats beside one power of two a block, rounded at random
//
// `noise` is uniform in [0, 2^20). Adding it below the last bit kept and cutting off rounds up
// with the probability of the part cut off. x is at most 1.875.

constexpr uint32_t kUnsignedLow = 96u << 3;   // 5 bits exponent, 3 bits mantissa
constexpr uint32_t kSignedLow = 112u << 3;    // sign, 4 bits exponent, 3 bits mantissa

inline float of_unsigned(uint8_t code) {
  return code == 0 ? 0.0f : of_bits((code + kUnsignedLow) << 20);
}

// Never 0 for what is not 0: it is a divisor. What is too small becomes the smallest.
inline uint8_t to_unsigned(float x, uint32_t noise) {
  const int32_t code = static_cast<int32_t>((bits_of(x) + noise) >> 20)
                       - static_cast<int32_t>(kUnsignedLow);
  const int32_t bounded = std::min(std::max(code, 1), 255);
  return static_cast<uint8_t>(x > 0.0f ? bounded : 0);
}

inline float of_signed(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t rest = code & 0x7Fu;
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-17f);
  const uint32_t normal = (rest + kSignedLow) << 20;
  return of_bits(sign | (rest < 8u ? small : normal));
}

inline uint8_t to_signed(float x, uint32_t noise) {
  const uint32_t bits = bits_of(x);
  const uint32_t rest = bits & 0x7FFFFFFFu;
  const int32_t normal = static_cast<int32_t>((rest + noise) >> 20)
                         - static_cast<int32_t>(kSignedLow);
  const float steps = of_bits(rest) * 0x1p17f;  // in units of the smallest
  const float part = static_cast<float>(static_cast<int32_t>(noise)) * 0x1p-20f;
  const int32_t small = static_cast<int32_t>(std::min(steps, 8.0f) + part);
  const int32_t code = std::min(rest < (113u << 23) ? small : normal, 127);
  return static_cast<uint8_t>(((bits >> 24) & 0x80u) | static_cast<uint32_t>(code));
}

// The power of two that brings `largest` into (0.9375, 1.875]; 0 for nothing to scale.
inline float block_scale(float largest) {
  if (!(largest > 0x1p-100f)) return largest != largest ? largest : 0.0f;
  const uint32_t exponent = (bits_of(largest) + (1u << 20) - 1u) >> 23;
  return of_bits(exponent << 23);
}

// 32 bits drawn from what an element holds and the step: the same wherever it lies.
inline uint32_t draw_of(float param, float grad, uint32_t draw) {
  uint32_t x = bits_of(param) * 0x9E3779B1u + bits_of(grad) * 0x85EBCA6Bu + draw;
  x ^= x >> 15;
  x *= 0x2C1B3C6Du;
  x ^= x >> 12;
  x *= 0x297A2D39u;
  return x ^ (x >> 15);
}

// ---- blocks: widen, narrow

#define EACH for (int64_t i = 0; i < n; ++i)
// Into a caller that knows n = 256: loops without heads and tails are a fifth faster.
#define INLINE __attribute__((always_inline)) inline

INLINE void widen(const void* source, int32_t kind, float* __restrict to, int64_t n) {
  const auto* half = static_cast<const uint16_t*>(source);
  const auto* wide = static_cast<const float*>(source);
  if (kind == kBf16) EACH to[i] = of_bf16(half[i]);
  else if (kind == kFp16) EACH to[i] = of_fp16(half[i]);
  else EACH to[i] = wide[i];
}

INLINE void narrow(const float* __restrict from, int32_t kind, void* target, int64_t n) {
  auto* half = static_cast<uint16_t*>(target);
  auto* wide = static_cast<float*>(target);
  if (kind == kBf16) EACH half[i] = to_bf16(from[i]);
  else if (kind == kFp16) EACH half[i] = to_fp16(from[i]);
  else EACH wide[i] = from[i];
}

INLINE void join(const uint16_t* high, const uint16_t* low, float* __restrict to, int64_t n) {
  EACH {
    const auto low_half = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(low[i])));
    to[i] = of_bits((static_cast<uint32_t>(high[i]) << 16) + low_half);
  }
}

// The high half is rounded to nearest, ties up: the low half is then what is missing, signed.
INLINE void split(const float* __restrict from, uint16_t* high, uint16_t* low, int64_t n) {
  EACH {
    const uint32_t bits = from[i] != from[i] ? 0x7FC00000u : bits_of(from[i]);
    high[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    low[i] = static_cast<uint16_t>(bits);
  }
}

INLINE float largest_of(const float* from, int64_t n) {
  uint32_t largest = 0;  // of bits: their order is that of the values, NaN the largest
  EACH largest = std::max(largest, bits_of(from[i]) & 0x7FFFFFFFu);
  return of_bits(largest);
}

INLINE void widen_unsigned(const uint8_t* from, float scale, float* __restrict to, int64_t n) {
  EACH to[i] = of_unsigned(from[i]) * scale;
}

INLINE void widen_signed(const uint8_t* from, float scale, float* __restrict to, int64_t n) {
  EACH to[i] = of_signed(from[i]) * scale;
}

INLINE float narrow_unsigned(const float* __restrict from, const uint32_t* __restrict draws,
                      uint8_t* __restrict to, int64_t n) {
  const float scale = block_scale(largest_of(from, n));
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  EACH to[i] = to_unsigned(from[i] * inverse, draws[i] >> 12);
  return scale;
}

INLINE float narrow_signed(const float* __restrict from, const uint32_t* __restrict draws,
                    uint8_t* __restrict to, int64_t n) {
  const float scale = block_scale(largest_of(from, n));
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  EACH to[i] = to_signed(from[i] * inverse, draws[i] & 0xFFFFFu);
  return scale;
}

INLINE void narrow_at_random(const float* __restrict from, const uint32_t* __restrict draws,
                      uint16_t* __restrict to, int64_t n) {
  EACH {
    const uint32_t rounded = (bits_of(from[i]) + (draws[i] >> 16)) >> 16;
    const bool is_finite = (bits_of(from[i]) & 0x7F800000u) != 0x7F800000u;
    to[i] = static_cast<uint16_t>(is_finite ? rounded : bits_of(from[i]) >> 16);
  }
}

// ---- rules, on fp32 in the order of torch's single-tensor optimizers

struct Adam {
  explicit Adam(const Update& u)
      : l2(u.l2), decay(u.decay), keep(u.second_keep), add(u.second_weight),
        root(u.root_correction), eps(u.eps), step(u.step_size),
        is_near(u.first_weight < 0.5f),
        weight(is_near ? u.first_weight : u.first_weight - 1.0f) {}

  INLINE void operator()(float& p, float g, float& m, float& v) const {
    g = l2 != 0.0f ? multiply_add(l2, p, g) : g;
    const float difference = g - m;
    m = multiply_add(weight, difference, is_near ? m : g);  // from the nearer end, as torch does
    v = multiply_add(add * g, g, v * keep);
    p = p * decay + step * m / (std::sqrt(v) / root + eps);
  }

  const float l2, decay, keep, add, root, eps, step;
  const bool is_near;
  const float weight;
};

INLINE void sgd(const Update& u, float* __restrict p, float* __restrict g, float* __restrict m,
                int64_t n) {
  if (u.l2 != 0.0f) EACH g[i] = multiply_add(u.l2, p[i], g[i]);
  if (m != nullptr) {
    if (u.is_first) EACH m[i] = g[i];
    else EACH m[i] = multiply_add(u.second_keep, g[i], m[i] * u.first_weight);
    if (u.is_nesterov) EACH g[i] = multiply_add(u.first_weight, m[i], g[i]);
    else EACH g[i] = m[i];
  }
  EACH p[i] = multiply_add(u.step_size, g[i], p[i]);
}

// ---- one block, all of it

struct Scratch {
  alignas(64) float p[kBlock], g[kBlock], m[kBlock], v[kBlock];
  alignas(64) uint32_t draws[kBlock];
};

template <typename T>
inline T* at(void* base, int64_t index) { return static_cast<T*>(base) + index; }

INLINE float* load_moment(const Update& u, void* moment, const float* scale, bool is_signed,
                   int64_t start, float* own, int64_t n) {
  if (moment == nullptr) return nullptr;
  if (u.form == kWide) return at<float>(moment, start);
  if (u.form == kHalf) widen(at<uint16_t>(moment, start), kBf16, own, n);
  else if (is_signed) widen_signed(at<uint8_t>(moment, start), scale[start / kBlock], own, n);
  else widen_unsigned(at<uint8_t>(moment, start), scale[start / kBlock], own, n);
  return own;
}

INLINE void store_moments(const Update& u, const float* m, const float* v, const uint32_t* draws,
                   int64_t start, int64_t n) {
  if (u.form == kHalf) {
    if (m != nullptr) narrow(m, kBf16, at<uint16_t>(u.first, start), n);
    if (v != nullptr) narrow_at_random(v, draws, at<uint16_t>(u.second, start), n);
  } else if (u.form == kByte) {
    const int64_t block = start / kBlock;
    if (m != nullptr)
      u.first_scale[block] = narrow_signed(m, draws, at<uint8_t>(u.first, start), n);
    if (v != nullptr)
      u.second_scale[block] = narrow_unsigned(v, draws, at<uint8_t>(u.second, start), n);
  }
}

INLINE void store_param(const Update& u, const float* p, int64_t start, int64_t n) {
  const void* source = p;
  int32_t kind = kFp32;
  if (u.remainder != nullptr) {
    split(p, at<uint16_t>(u.param, start), u.remainder + start, n);
    source = at<uint16_t>(u.param, start);
    kind = kBf16;
  }
  if (u.out == nullptr) return;
  const int64_t size = u.out_float == kFp32 ? 4 : 2;
  void* target = static_cast<char*>(u.out) + start * size;
  if (kind == kFp32) {
    narrow(p, u.out_float, target, n);
  } else {
    alignas(64) float published[kBlock];
    widen(source, kind, published, n);
    narrow(published, u.out_float, target, n);
  }
}

INLINE void update_block(const Update& u, Scratch& own, int64_t start, int64_t n) {
  const int64_t size = u.grad_float == kFp32 ? 4 : 2;
  widen(static_cast<const char*>(u.grad) + start * size, u.grad_float, own.g, n);
  if (u.is_scaled) EACH own.g[i] *= u.grad_scale;
  float* p = own.p;
  if (u.remainder == nullptr) p = at<float>(u.param, start);
  else join(at<uint16_t>(u.param, start), u.remainder + start, p, n);
  float* m = load_moment(u, u.first, u.first_scale, true, start, own.m, n);
  float* v = load_moment(u, u.second, u.second_scale, false, start, own.v, n);
  if (u.form != kWide) EACH own.draws[i] = draw_of(p[i], own.g[i], u.draw);
  if (u.rule == kSgd) {
    sgd(u, p, own.g, m, n);
  } else {
    const Adam adam(u);
    float* __restrict g = own.g;
    EACH adam(p[i], g[i], m[i], v[i]);
  }
  store_moments(u, m, v, own.draws, start, n);
  store_param(u, p, start, n);
}

// ---- the usual case without detours: Adam, all state in fp32

template <int32_t kind>
INLINE float widened(const void* from, int64_t i) {
  if (kind == kFp32) return static_cast<const float*>(from)[i];
  const uint16_t half = static_cast<const uint16_t*>(from)[i];
  return kind == kBf16 ? of_bf16(half) : of_fp16(half);
}

template <int32_t grad_float, bool has_out>
void stream(const Update& u, int64_t start, int64_t end) {
  const Adam adam(u);
  const float scale = u.is_scaled ? u.grad_scale : 1.0f;  // times 1 changes nothing
  auto* __restrict p = static_cast<float*>(u.param);
  auto* __restrict m = static_cast<float*>(u.first);
  auto* __restrict v = static_cast<float*>(u.second);
  auto* __restrict out = static_cast<uint16_t*>(u.out);
  for (int64_t i = start; i < end; ++i) {
    adam(p[i], widened<grad_float>(u.grad, i) * scale, m[i], v[i]);
    if (has_out) out[i] = to_bf16(p[i]);
  }
}

using Range = void (*)(const Update&, int64_t start, int64_t end);

void in_blocks(const Update& u, int64_t start, int64_t end) {
  Scratch own;
  for (; start + kBlock <= end; start += kBlock) update_block(u, own, start, kBlock);
  if (start < end) update_block(u, own, start, end - start);
}

Range range_for(const Update& u) {
  const bool has_out = u.out != nullptr;
  if (u.rule != kAdam || u.form != kWide || u.remainder != nullptr) return in_blocks;
  if (has_out && u.out_float != kBf16) return in_blocks;
  if (u.grad_float == kFp32) return has_out ? stream<kFp32, true> : stream<kFp32, false>;
  if (u.grad_float == kBf16) return has_out ? stream<kBf16, true> : stream<kBf16, false>;
  return in_blocks;
}

void work(const Update& u, Range range, std::atomic<int64_t>& next) {
  for (;;) {
    const int64_t start = next.fetch_add(kPiece, std::memory_order_relaxed);
    if (start >= u.numel) return;
    range(u, start, std::min(start + kPiece, u.numel));
  }
}

}  // namespace

extern "C" {

// Bytes of Update: whoever calls compares them with its own.
int64_t roundpipe_update_bytes() { return static_cast<int64_t>(sizeof(Update)); }

// Returns when all is written. Threads that the system refuses are done without.
void roundpipe_update(const Update* update) {
  const Range range = range_for(*update);
  std::atomic<int64_t> next{0};
  std::vector<std::thread> others;
  const int64_t pieces = (update->numel + kPiece - 1) / kPiece;
  try {
    const int64_t more = std::min<int64_t>(update->threads, pieces) - 1;
    if (more > 0) others.reserve(static_cast<size_t>(more));
    for (int64_t i = 0; i < more; ++i)
      others.emplace_back([=, &next] { work(*update, range, next); });
  } catch (const std::exception&) {
  }
  work(*update, range, next);
  for (auto& thread : others) thread.join();
}

}  // extern "C"
