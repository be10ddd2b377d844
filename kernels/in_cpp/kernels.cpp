// Kernels for CPUs behind a plain C interface: no headers of torch, so that the system compiler builds them in seconds.
//
// A launch is one kernel with its arguments. `trimaran_run` executes a list of launches on a team of threads; threads take
// numbered pieces of a launch from a ticket and meet between launches. A recorded forward pass is such a list: its
// arguments stay, the sizes come with each run.
//
// Sizes: [0] tokens (or rows), [1] sequences. Dtypes: 0 float32, 1 bfloat16, 2 float16. Sums and softmax are in float32.

#include <omp.h>
#include <time.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };

constexpr int W = 16;  // lanes of one vector; the compiler splits it where registers are narrower
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t VecI __attribute__((vector_size(64)));
typedef uint32_t VecU __attribute__((vector_size(64)));
typedef uint16_t VecH __attribute__((vector_size(32)));

inline Vec splat(float x) { return Vec{} + x; }

inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
inline Vec load(const Bf16* p) {
  VecH h; std::memcpy(&h, p, sizeof h);
  VecU u = __builtin_convertvector(h, VecU) << 16;
  return (Vec)u;
}
inline Vec load(const Fp16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  Vec v; _Float16 h[W]; std::memcpy(h, p, sizeof h);
  for (int i = 0; i < W; ++i) v[i] = float(h[i]);
  return v;
#endif
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(Bf16* p, Vec v) {  // round to nearest even; a NaN stays one
  VecU u = (VecU)v;
  VecU rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  VecU chosen = (u & 0x7fffffff) > 0x7f800000 ? (VecU{} + 0x7fc0) : rounded;
  VecH h = __builtin_convertvector(chosen, VecH);
  std::memcpy(p, &h, sizeof h);
}
inline void store(Fp16* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  _Float16 h[W];
  for (int i = 0; i < W; ++i) h[i] = _Float16(v[i]);
  std::memcpy(p, h, sizeof h);
#endif
}
inline float value(float x) { return x; }
inline float value(Bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline float value(Fp16 x) { _Float16 h; std::memcpy(&h, &x, 2); return float(h); }
inline void assign(float& to, float x) { to = x; }
inline void assign(Bf16& to, float x) { Bf16 lanes[W]; store(lanes, splat(x)); to = lanes[0]; }
inline void assign(Fp16& to, float x) { _Float16 h = _Float16(x); std::memcpy(&to, &h, 2); }

inline float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0; for (int i = 0; i < W; ++i) s += v[i]; return s;
#endif
}
inline float maximum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0]; for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m; return m;
#endif
}
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline bool any(VecI v) {
  int found = 0;
  for (int i = 0; i < W; ++i) found |= v[i];
  return found != 0;
}

// exp to about 1e-7 relative; below -87 it is the smallest normal number times nothing that matters, NaN stays NaN.
inline Vec exponential(Vec x) {
  x = x < splat(-87.f) ? splat(-87.f) : x;
  x = x > splat(88.f) ? splat(88.f) : x;
  Vec scaled = x * 1.44269504088896341f;
  VecI n = __builtin_convertvector(scaled + (scaled < splat(0.f) ? splat(-.5f) : splat(.5f)), VecI);
  Vec whole = __builtin_convertvector(n, Vec);
  Vec r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  return p * (Vec)((n + 127) << 23);
}

struct Launch {  // mirrored by library.py
  int64_t kernel;
  void* pointers[12];
  int64_t numbers[12];
  double reals[2];
};

struct Team {  // what one thread sees of a launch
  int thread, num_threads;
  std::atomic<int64_t>* ticket;
  int64_t next() { return num_threads == 1 ? serial++ : ticket->fetch_add(1, std::memory_order_relaxed); }
  int64_t serial = 0;
};

constexpr int64_t kPagedAttention = 5;

template <class T> inline T* at(const Launch& a, int i) { return (T*)a.pointers[i]; }

// Scratch of one thread, kept between launches.
inline float* scratch(size_t num_floats) {
  static thread_local std::vector<float> memory;
  if (memory.size() < num_floats + W) memory.resize(num_floats + W);
  return (float*)(((uintptr_t)memory.data() + 63) & ~uintptr_t(63));
}

// ---- embed: pointers out, ids, table, last tokens; numbers channels, first id, held ids
template <class T> void embed(const Launch& a, const int64_t* sizes, Team team) {
  T* out = at<T>(a, 0); const int32_t* ids = at<int32_t>(a, 1); const T* table = at<T>(a, 2);
  const int64_t* last = at<int64_t>(a, 3);
  int64_t D = a.numbers[0], first = a.numbers[1], held = a.numbers[2], piece = 16;
  for (int64_t c; (c = team.next()) * piece < sizes[0];)
    for (int64_t t = c * piece; t < std::min(sizes[0], (c + 1) * piece); ++t) {
      int64_t id = (ids[t] < 0 ? last[-1 - ids[t]] : ids[t]) - first;
      if (id >= 0 && id < held) std::memcpy(out + t * D, table + id * D, D * sizeof(T));
      else std::memset((void*)(out + t * D), 0, D * sizeof(T));
    }
}

// ---- norms: pointers out, residual (or null), x, weight; numbers channels, x stride; reals eps
template <class T> void norm_row(T* out, T* residual, const T* x, const T* weight, int64_t D, float eps) {
  float* f = scratch(D);
  Vec squares{};
  int64_t d = 0;
  for (; d + W <= D; d += W) {
    Vec v = load(x + d);
    if (residual) { v = v + load(residual + d); store(residual + d, v); v = load(residual + d); }
    store(f + d, v);
    squares += v * v;
  }
  float total = sum(squares);
  for (; d < D; ++d) {
    float v = value(x[d]);
    if (residual) { assign(residual[d], v + value(residual[d])); v = value(residual[d]); }
    f[d] = v;
    total += v * v;
  }
  float scale = 1.f / std::sqrt(total / float(D) + eps);
  T rounded[W];
  for (d = 0; d + W <= D; d += W) {
    store(rounded, load(f + d) * scale);
    store(out + d, load(rounded) * load(weight + d));
  }
  for (; d < D; ++d) {
    T r; assign(r, f[d] * scale);
    assign(out[d], value(r) * value(weight[d]));
  }
}
template <class T> void norm(const Launch& a, const int64_t* sizes, Team team) {
  T *out = at<T>(a, 0), *residual = at<T>(a, 1), *x = at<T>(a, 2), *weight = at<T>(a, 3);
  int64_t D = a.numbers[0], stride = a.numbers[1], piece = 4;
  for (int64_t c; (c = team.next()) * piece < sizes[0];)
    for (int64_t t = c * piece; t < std::min(sizes[0], (c + 1) * piece); ++t)
      norm_row(out + t * D, residual ? residual + t * D : nullptr, x + t * stride, weight, D, float(a.reals[0]));
}

// ---- silu_and_mul: pointers out, gate_up; numbers intermediate channels
template <class T> void silu_and_mul(const Launch& a, const int64_t* sizes, Team team) {
  T* out = at<T>(a, 0); const T* x = at<T>(a, 1);
  int64_t I = a.numbers[0], piece = 1024, pieces = (I + piece - 1) / piece;
  for (int64_t c; (c = team.next()) < sizes[0] * pieces;) {
    int64_t t = c / pieces, d = c % pieces * piece, end = std::min(I, d + piece);
    const T *gate = x + t * 2 * I, *up = gate + I; T* o = out + t * I;
    T rounded[W];
    for (; d + W <= end; d += W) {
      Vec g = load(gate + d);
      store(rounded, g / (exponential(-g) + 1.f));
      store(o + d, load(rounded) * load(up + d));
    }
    for (; d < end; ++d) {
      float g = value(gate[d]); T r; assign(r, g / (std::exp(-g) + 1.f));
      assign(o[d], value(r) * value(up[d]));
    }
  }
}

// ---- rotary_and_kv_write: pointers q, qkv, positions, slots, cos_sin, k cache, v cache, q norm, k norm;
// numbers heads, kv heads, head size, rotary size; reals eps
template <class T, class C> void rotary_head(C* out, const T* x, const T* weight, T* normed, const float* cos_sin,
                                             int64_t D, int64_t R, float eps) {
  if (weight) { norm_row<T>(normed, nullptr, x, weight, D, eps); x = normed; }
  int64_t half = R / 2, i = 0;
  const float *cosines = cos_sin, *sines = cos_sin + half;
  for (; i + W <= half; i += W) {
    Vec first = load(x + i), second = load(x + half + i), c = load(cosines + i), s = load(sines + i);
    store(out + i, first * c - second * s);
    store(out + half + i, second * c + first * s);
  }
  for (; i < half; ++i) {
    float first = value(x[i]), second = value(x[half + i]), c = cosines[i], s = sines[i];
    assign(out[i], first * c - second * s);
    assign(out[half + i], second * c + first * s);
  }
  for (i = R; i < D; ++i) assign(out[i], value(x[i]));
}
template <class T> void rotary_and_kv_write(const Launch& a, const int64_t* sizes, Team team) {
  T *q = at<T>(a, 0), *qkv = at<T>(a, 1), *kc = at<T>(a, 5), *vc = at<T>(a, 6), *qn = at<T>(a, 7), *kn = at<T>(a, 8);
  const int32_t *positions = at<int32_t>(a, 2), *slots = at<int32_t>(a, 3); const float* table = at<float>(a, 4);
  int64_t H = a.numbers[0], G = a.numbers[1], D = a.numbers[2], R = a.numbers[3], piece = 4;
  float eps = float(a.reals[0]);
  std::vector<T> normed(D);
  for (int64_t c; (c = team.next()) * piece < sizes[0];)
    for (int64_t t = c * piece; t < std::min(sizes[0], (c + 1) * piece); ++t) {
      const float* cos_sin = table + positions[t] * R;
      const T* x = qkv + t * (H + 2 * G) * D;
      for (int64_t h = 0; h < H; ++h) rotary_head(q + (t * H + h) * D, x + h * D, qn, normed.data(), cos_sin, D, R, eps);
      if (slots[t] < 0) continue;
      T *k = kc + slots[t] * G * D, *v = vc + slots[t] * G * D;
      for (int64_t g = 0; g < G; ++g) rotary_head(k + g * D, x + (H + g) * D, kn, normed.data(), cos_sin, D, R, eps);
      std::memcpy((void*)v, x + (H + G) * D, G * D * sizeof(T));
    }
}

// ---- linear: pointers out, x, packed, bias (or null); numbers inputs K, outputs N, x stride, out dtype, weight dtype,
// alike (see block_of).
// Packed: panels of NR outputs, inputs outermost. bfloat16 keeps pairs of inputs of one output side by side. Float32 x may
// meet bfloat16 weights, which widen exactly: half the memory to read for the same result.
constexpr int NR = 32;

inline void put(void* out, int64_t dtype, int64_t index, Vec v, int64_t count) {
  if (count >= W) {
    if (dtype == 0) store((float*)out + index, v);
    else if (dtype == 1) store((Bf16*)out + index, v);
    else store((Fp16*)out + index, v);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (dtype == 0) ((float*)out)[index + i] = v[i];
    else if (dtype == 1) assign(((Bf16*)out)[index + i], v[i]);
    else assign(((Fp16*)out)[index + i], v[i]);
  }
}

// x rows as the inner loop wants them: float32, or the bfloat16 words themselves where the CPU multiplies them.
#if defined(__AVX512BF16__)
constexpr bool kBf16Pairs = true;
#else
constexpr bool kBf16Pairs = false;
#endif

template <class T, int M> inline void multiply(Vec (&acc)[M][2], const T* panel, const float* const (&x)[M], int64_t k) {
  Vec w0 = load(panel + k * NR), w1 = load(panel + k * NR + W);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    Vec b = splat(x[m][k]);
    acc[m][0] += b * w0;
    acc[m][1] += b * w1;
  }
}
// Two inputs at once. With `kDot` the rows of x are pairs of bfloat16 words, else floats.
template <bool kDot, int M>
inline void multiply_pairs(Vec (&acc)[M][2], const Bf16* panel, const float* const (&x)[M], int64_t k2) {
  VecU w0, w1;
  std::memcpy(&w0, panel + k2 * 2 * NR, 64);
  std::memcpy(&w1, panel + k2 * 2 * NR + 2 * W, 64);
#if defined(__AVX512BF16__)
  if constexpr (kDot) {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      __m512bh b = (__m512bh)_mm512_set1_epi32(((const int32_t*)x[m])[k2]);
      acc[m][0] = (Vec)_mm512_dpbf16_ps((__m512)acc[m][0], b, (__m512bh)w0);
      acc[m][1] = (Vec)_mm512_dpbf16_ps((__m512)acc[m][1], b, (__m512bh)w1);
    }
    return;
  }
#endif
  Vec even0 = (Vec)(w0 << 16), odd0 = (Vec)(w0 & 0xffff0000u), even1 = (Vec)(w1 << 16), odd1 = (Vec)(w1 & 0xffff0000u);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    Vec e = splat(x[m][2 * k2]), o = splat(x[m][2 * k2 + 1]);
    acc[m][0] += e * even0; acc[m][0] += o * odd0;
    acc[m][1] += e * even1; acc[m][1] += o * odd1;
  }
}

template <class T, bool kDot, int M>
void block(const T* panel, const float* const* rows, Vec (*out)[2], int64_t K) {
  Vec acc[M][2] = {};
  const float* x[M];
  for (int m = 0; m < M; ++m) x[m] = rows[m];
  if constexpr (std::is_same_v<T, Bf16>) {
    if constexpr (M <= 2) {  // a second set of sums hides the latency of the multiply
      Vec more[M][2] = {};
      int64_t k = 0;
      for (; k + 2 <= K / 2; k += 2) {
        __builtin_prefetch(panel + k * 2 * NR + 1024);
        __builtin_prefetch(panel + k * 2 * NR + 1024 + 32);
        __builtin_prefetch(panel + k * 2 * NR + 1024 + 64);
        __builtin_prefetch(panel + k * 2 * NR + 1024 + 96);
        multiply_pairs<kDot, M>(acc, panel, x, k);
        multiply_pairs<kDot, M>(more, panel, x, k + 1);
      }
      for (; k < K / 2; ++k) multiply_pairs<kDot, M>(acc, panel, x, k);
      for (int m = 0; m < M; ++m) { acc[m][0] += more[m][0]; acc[m][1] += more[m][1]; }
    } else {
      for (int64_t k = 0; k < K / 2; ++k) {
        __builtin_prefetch(panel + k * 2 * NR + 1024);
        __builtin_prefetch(panel + k * 2 * NR + 1024 + 32);
        multiply_pairs<kDot, M>(acc, panel, x, k);
      }
    }
  } else {
    if constexpr (M <= 2) {
      Vec more[M][2] = {};
      int64_t k = 0;
      for (; k + 2 <= K; k += 2) {
        for (size_t b = 0; b < 2 * NR * sizeof(T); b += 64) __builtin_prefetch((const char*)(panel + k * NR) + 2048 + b);
        multiply<T, M>(acc, panel, x, k);
        multiply<T, M>(more, panel, x, k + 1);
      }
      for (; k < K; ++k) multiply<T, M>(acc, panel, x, k);
      for (int m = 0; m < M; ++m) { acc[m][0] += more[m][0]; acc[m][1] += more[m][1]; }
    } else {
      for (int64_t k = 0; k < K; ++k) {
        for (size_t b = 0; b < NR * sizeof(T); b += 64) __builtin_prefetch((const char*)(panel + k * NR) + 2048 + b);
        multiply<T, M>(acc, panel, x, k);
      }
    }
  }
  for (int m = 0; m < M; ++m) { out[m][0] = acc[m][0]; out[m][1] = acc[m][1]; }
}

// `alike`: sums are added up in the same order for any number of rows.
template <class T, bool kDot>
int64_t block_of(const T* panel, const float* const* rows, Vec (*out)[2], int64_t K, int64_t M, bool alike) {
  if (M >= 12) { block<T, kDot, 12>(panel, rows, out, K); return 12; }
  if (M > 8) { block<T, kDot, 12>(panel, rows, out, K); return M; }
  if (M > 6) { block<T, kDot, 8>(panel, rows, out, K); return M; }
  if (M > 4) { block<T, kDot, 6>(panel, rows, out, K); return M; }
  if (M > 2 || alike) { block<T, kDot, 4>(panel, rows, out, K); return M; }
  if (M == 2) { block<T, kDot, 2>(panel, rows, out, K); return 2; }
  block<T, kDot, 1>(panel, rows, out, K);
  return 1;
}

template <class T, class Weight = T> void linear(const Launch& a, const int64_t* sizes, Team team) {
  const T *x = at<T>(a, 1), *bias = at<T>(a, 3); const Weight* packed = at<Weight>(a, 2);
  int64_t K = a.numbers[0], N = a.numbers[1], stride = a.numbers[2], out_dtype = a.numbers[3], T_ = sizes[0];
  bool alike = a.numbers[5];
  constexpr bool kDot = std::is_same_v<T, Bf16> && kBf16Pairs, direct = std::is_same_v<T, float> || kDot;
  constexpr int64_t kRows = 96;  // rows of x that share one pass over a panel
  int64_t panels = (N + NR - 1) / NR, row_pieces = (T_ + kRows - 1) / kRows;
  float* converted = direct ? nullptr : scratch(kRows * K);
  int64_t converted_piece = -1;
  const float* rows[kRows + 12];
  Vec out[12][2];
  for (int64_t c; (c = team.next()) < panels * row_pieces;) {
    int64_t piece = c / panels, panel = c % panels, begin = piece * kRows, count = std::min(kRows, T_ - begin);
    if constexpr (direct) {
      for (int64_t r = 0; r < count; ++r) rows[r] = (const float*)(x + (begin + r) * stride);
    } else {
      for (int64_t r = 0; r < count; ++r) {
        rows[r] = converted + r * K;
        if (converted_piece == piece) continue;
        const T* from = x + (begin + r) * stride;
        int64_t k = 0;
        for (; k + W <= K; k += W) store(converted + r * K + k, load(from + k));
        for (; k < K; ++k) converted[r * K + k] = value(from[k]);
      }
      converted_piece = piece;
    }
    for (int64_t r = count; r < count + 12; ++r) rows[r] = rows[count - 1];  // filler rows are computed, never stored
    Vec bias0{}, bias1{};
    int64_t n = panel * NR, left = std::min<int64_t>(NR, N - n);
    if (bias)
      for (int64_t i = 0; i < left; ++i) (i < W ? bias0[i] : bias1[i - W]) = value(bias[n + i]);
    const Weight* weights = packed + panel * NR * K;
    for (int64_t r = 0; r < count;) {
      int64_t done = block_of<Weight, kDot>(weights, rows + r, out, K, count - r, alike);
      for (int64_t m = 0; m < done; ++m) {
        int64_t index = (begin + r + m) * N + n;
        put(a.pointers[0], out_dtype, index, out[m][0] + bias0, left);
        if (left > W) put(a.pointers[0], out_dtype, index + W, out[m][1] + bias1, left - W);
      }
      r += done;
    }
  }
}

// ---- paged_attention: pointers out, q, k cache, v cache, block tables, query starts, kv lengths, rows;
// numbers heads, kv heads, head size, block size, table width, window, alike (a token's sums are added up in the same order
// whether it is alone or among others); reals scale
constexpr int kTile = 32;      // cached positions handled together
constexpr int kPart = 256;     // cached positions that one thread sees at a time
constexpr int kMaxRows = 48;   // query rows (tokens x heads of a group) handled together in prefill

struct Attention {
  int64_t H, G, D, S, M, window; float scale; bool alike, is_spread;
  Attention(const Launch& a, const int64_t* sizes, int64_t num_threads)
      : H(a.numbers[0]), G(a.numbers[1]), D(a.numbers[2]), S(a.numbers[3]), M(a.numbers[4]), window(a.numbers[5]),
        scale(float(a.reals[0])), alike(a.numbers[6]),
        is_spread(!alike && num_threads > 1 && sizes[1] * G < 4 * num_threads) {}
  int64_t first(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
  int64_t parts(int64_t position) const { return (position + 1 - first(position) + kPart - 1) / kPart; }
  int64_t tokens_per_piece() const { return std::max<int64_t>(1, kMaxRows / (H / G)); }
  // Pieces of a sequence's `tokens` last tokens, each one ticket per group: parts of what a single one sees where the work
  // is spread, else pieces of the tokens.
  int64_t pieces(int64_t tokens, int64_t length) const {
    if (tokens == 1) return is_spread ? parts(length - 1) : 1;
    return (tokens + tokens_per_piece() - 1) / tokens_per_piece();
  }
};

// Positions of one tile: pointers to their keys or values.
template <class T> inline void locate(const T** rows, const T* cache, const int32_t* table, const Attention& s, int64_t g,
                                      int64_t begin, int64_t count) {
  int64_t block = begin / s.S, offset = begin % s.S;
  for (int64_t i = 0; i < count; ++i) {
    rows[i] = cache + ((int64_t(table[block]) * s.S + offset) * s.G + g) * s.D;
    if (++offset == s.S) { offset = 0; ++block; }
  }
}
template <class T> inline void prefetch(const T* const* rows, int64_t count, int64_t D) {
  for (int64_t i = 0; i < count; ++i)
    for (size_t b = 0; b < D * sizeof(T); b += 64) __builtin_prefetch((const char*)rows[i] + b);
}

// Sums of the lanes of 16 vectors, as one vector.
inline Vec sums(Vec (&v)[W]) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  for (int width = W / 2; width; width /= 2)  // sums of neighbouring lanes, two vectors becoming one
    for (int i = 0; i < width; ++i) {
      Vec a = v[2 * i], b = v[2 * i + 1];
      v[i] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
             __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    }
  return v[0];
#else
  Vec total;
  for (int i = 0; i < W; ++i) total[i] = sum(v[i]);
  return total;
#endif
}

// What one query token's heads of a group have seen of some positions: weighed values, largest score, sum of weights.
struct Seen {
  float *acc, *top, *total;
  Seen(float* memory, int64_t group, int64_t DV) : acc(memory), top(memory + group * DV), total(top + group) {}
  static int64_t floats(int64_t group, int64_t DV) { return (group * (DV + 2) + W - 1) / W * W; }
};

// R heads of one query token against the positions [begin, end), which are not none.
template <class T, int R>
void see(float* acc, float* top, float* total, const float* q, const T* kc, const T* vc, const int32_t* table,
         const Attention& s, int64_t g, int64_t begin, int64_t end, int64_t DV) {
  int64_t D = s.D;
  const T *keys[kTile], *values[kTile], *next[kTile];
  alignas(64) float p[R][kTile];
  std::memset(acc, 0, sizeof(float) * R * DV);
  for (int r = 0; r < R; ++r) { top[r] = -INFINITY; total[r] = 0; }
  int64_t some = std::min<int64_t>(kTile, end - begin);
  locate(keys, kc, table, s, g, begin, some);
  prefetch(keys, some, D);
  for (; begin < end; begin += kTile) {
    int64_t count = std::min<int64_t>(kTile, end - begin), rest = std::min<int64_t>(kTile, end - begin - count);
    locate(values, vc, table, s, g, begin, count);
    prefetch(values, count, D);
    for (int64_t half = 0; half < kTile; half += W) {
      Vec dots[R][W];
      for (int64_t i = 0; i < W; ++i) {
        for (int r = 0; r < R; ++r) dots[r][i] = Vec{};
        if (half + i >= count) continue;
        const T* key = keys[half + i];
        int64_t d = 0;
        for (; d + W <= D; d += W) {
          Vec k = load(key + d);
          for (int r = 0; r < R; ++r) dots[r][i] += load(q + r * DV + d) * k;
        }
        for (; d < D; ++d)
          for (int r = 0; r < R; ++r) dots[r][i][0] += q[r * DV + d] * value(key[d]);
      }
      for (int r = 0; r < R; ++r) store(p[r] + half, sums(dots[r]));
    }
    if (rest > 0) {
      locate(next, kc, table, s, g, begin + kTile, rest);
      prefetch(next, rest, D);
      std::memcpy(keys, next, sizeof keys);
    }
    float decay[R];
    for (int r = 0; r < R; ++r) {
      for (int64_t i = count; i < kTile; ++i) p[r][i] = -INFINITY;
      Vec p0 = load(p[r]), p1 = load(p[r] + W);
      float m = std::max(top[r], maximum(larger(p0, p1)));
      decay[r] = std::exp(top[r] - m);
      store(p[r], exponential(p0 - m)); store(p[r] + W, exponential(p1 - m));
      for (int64_t i = count; i < kTile; ++i) p[r][i] = 0;
      total[r] = total[r] * decay[r] + sum(load(p[r]) + load(p[r] + W));
      top[r] = m;
    }
    int64_t d = 0;
    for (; d + 4 * W <= D; d += 4 * W) {
      Vec a[R][4];
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j) a[r][j] = load(acc + r * DV + d + j * W) * decay[r];
      for (int64_t i = 0; i < count; ++i) {
        const T* v = values[i] + d;
        Vec v0 = load(v), v1 = load(v + W), v2 = load(v + 2 * W), v3 = load(v + 3 * W);
        for (int r = 0; r < R; ++r) { a[r][0] += p[r][i] * v0; a[r][1] += p[r][i] * v1; a[r][2] += p[r][i] * v2; a[r][3] += p[r][i] * v3; }
      }
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j) store(acc + r * DV + d + j * W, a[r][j]);
    }
    for (; d + W <= D; d += W)
      for (int r = 0; r < R; ++r) {
        Vec a = load(acc + r * DV + d) * decay[r];
        for (int64_t i = 0; i < count; ++i) a += p[r][i] * load(values[i] + d);
        store(acc + r * DV + d, a);
      }
    for (; d < D; ++d)
      for (int r = 0; r < R; ++r) {
        float a = acc[r * DV + d] * decay[r];
        for (int64_t i = 0; i < count; ++i) a += p[r][i] * value(values[i][d]);
        acc[r * DV + d] = a;
      }
  }
}

// All heads of a group of one query token against the positions [begin, end).
template <class T>
void see_part(Seen seen, const T* q, const T* kc, const T* vc, const int32_t* table, const Attention& s, int64_t g,
              int64_t begin, int64_t end, float* qf) {
  int64_t group = s.H / s.G, D = s.D, DV = (D + W - 1) / W * W;
  for (int64_t h = 0; h < group; ++h) {
    const T* from = q + (g * group + h) * D;
    int64_t d = 0;
    for (; d + W <= D; d += W) store(qf + h * DV + d, load(from + d) * s.scale);
    for (; d < D; ++d) qf[h * DV + d] = value(from[d]) * s.scale;
  }
#define SEE(R) see<T, R>(seen.acc + h * DV, seen.top + h, seen.total + h, qf + h * DV, kc, vc, table, s, g, begin, end, DV)
  for (int64_t h = 0; h < group; h += 4) switch (std::min<int64_t>(4, group - h)) {
    case 1: SEE(1); break;
    case 2: SEE(2); break;
    case 3: SEE(3); break;
    default: SEE(4);
  }
#undef SEE
}

// `all` has seen what `part` saw too.
void merge(Seen all, Seen part, int64_t group, int64_t DV) {
  for (int64_t h = 0; h < group; ++h) {
    float m = std::max(all.top[h], part.top[h]), old = std::exp(all.top[h] - m), more = std::exp(part.top[h] - m);
    for (int64_t d = 0; d < DV; d += W)
      store(all.acc + h * DV + d, load(all.acc + h * DV + d) * old + load(part.acc + h * DV + d) * more);
    all.total[h] = all.total[h] * old + part.total[h] * more;
    all.top[h] = m;
  }
}

template <class T> void write_seen(T* out, Seen seen, const Attention& s, int64_t g) {
  int64_t group = s.H / s.G, DV = (s.D + W - 1) / W * W;
  for (int64_t h = 0; h < group; ++h) {
    T* to = out + (g * group + h) * s.D;
    int64_t d = 0;
    for (; d + W <= s.D; d += W) store(to + d, load(seen.acc + h * DV + d) / seen.total[h]);
    for (; d < s.D; ++d) assign(to[d], seen.acc[h * DV + d] / seen.total[h]);
  }
}

// One query token: its heads of a group against all it sees, part after part. The parts do not depend on threads or
// neighbours, nor does the result.
template <class T>
void decode_rows(T* out, const T* q, const T* kc, const T* vc, const int32_t* table, const Attention& s, int64_t g,
                 int64_t position) {
  int64_t group = s.H / s.G, DV = (s.D + W - 1) / W * W, size = Seen::floats(group, DV), first = s.first(position);
  float* memory = scratch(2 * size + group * DV);
  Seen all(memory, group, DV), part(memory + size, group, DV);
  for (int64_t begin = first; begin <= position; begin += kPart) {
    int64_t end = std::min(begin + kPart, position + 1);
    see_part(begin == first ? all : part, q, kc, vc, table, s, g, begin, end, memory + 2 * size);
    if (begin != first) merge(all, part, group, DV);
  }
  write_seen(out, all, s, g);
}

// What threads see apart of one long sequence, to be merged by the last of them. Made before the threads start.
struct Spread {
  std::vector<float> memory;                            // one Seen per ticket of the launch
  std::unique_ptr<std::atomic<int64_t>[]> num_finished;  // per sequence and group; zero between launches
  int64_t num_counters = 0;
};
Spread spread;

template <class T>
void decode_part(T* out, const T* q, const T* kc, const T* vc, const int32_t* table, const Attention& s, int64_t g,
                 int64_t position, int64_t n, int64_t part, int64_t first_ticket) {
  int64_t group = s.H / s.G, DV = (s.D + W - 1) / W * W, size = Seen::floats(group, DV), parts = s.parts(position);
  int64_t begin = s.first(position) + part * kPart;
  auto seen = [&](int64_t part) { return Seen(spread.memory.data() + (first_ticket + part * s.G + g) * size, group, DV); };
  see_part(seen(part), q, kc, vc, table, s, g, begin, std::min(begin + kPart, position + 1), scratch(group * DV));
  std::atomic<int64_t>& finished = spread.num_finished[n * s.G + g];
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < parts) return;
  finished.store(0, std::memory_order_relaxed);
  for (int64_t other = 1; other < parts; ++other) merge(seen(0), seen(other), group, DV);
  write_seen(out, seen(0), s, g);
}

template <int R> inline void scores_of(float* p, const float* q, const float* keys, int64_t D, int64_t DV) {
  Vec s[R][2] = {};
  for (int64_t d = 0; d < D; ++d) {
    Vec k0 = load(keys + d * kTile), k1 = load(keys + d * kTile + W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) { Vec b = splat(q[r * DV + d]); s[r][0] += b * k0; s[r][1] += b * k1; }
  }
  for (int r = 0; r < R; ++r) { store(p + r * kTile, s[r][0]); store(p + r * kTile + W, s[r][1]); }
}
template <int R> inline void weigh(float* acc, const float* p, const float* decay, const float* values, int64_t DV, int64_t count) {
  for (int64_t d = 0; d < DV; d += W) {
    Vec a[R];
    for (int r = 0; r < R; ++r) a[r] = load(acc + r * DV + d) * decay[r];
    for (int64_t i = 0; i < count; ++i) {
      Vec v = load(values + i * DV + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) a[r] += p[r * kTile + i] * v;
    }
    for (int r = 0; r < R; ++r) store(acc + r * DV + d, a[r]);
  }
}

// Several query tokens from `position` on: rows are tokens x heads of the group; keys of a tile are turned so that lanes
// are positions.
template <class T>
void prefill_rows(T* out, const T* q, const T* kc, const T* vc, const int32_t* table, const Attention& s, int64_t g,
                  int64_t position, int64_t tokens) {
  int64_t group = s.H / s.G, D = s.D, DV = (D + W - 1) / W * W, R = tokens * group, RP = (R + 7) / 8 * 8;
  float* memory = scratch(RP * (2 * DV + kTile + 3) + kTile * DV * 2);
  float *qf = memory, *acc = qf + RP * DV, *kt = acc + RP * DV, *vt = kt + kTile * DV, *score = vt + kTile * DV;
  float *top = score + RP * kTile, *total = top + RP, *decay = total + RP;
  std::memset(memory, 0, sizeof(float) * (RP * 2 * DV + kTile * DV * 2));
  for (int64_t r = 0; r < RP; ++r) { top[r] = -INFINITY; total[r] = 0; decay[r] = 0; }
  for (int64_t r = 0; r < R; ++r)
    for (int64_t d = 0; d < D; ++d)
      qf[r * DV + d] = value(q[((r / group) * s.H + g * group + r % group) * D + d]) * s.scale;
  const T *keys[kTile], *values[kTile];
  // Tiles begin at the same places whoever is the first token here.
  int64_t last = position + tokens - 1, first = s.window ? std::max<int64_t>(0, position - s.window + 1) / kTile * kTile : 0;
  for (int64_t begin = first; begin <= last; begin += kTile) {
    int64_t count = std::min<int64_t>(kTile, last + 1 - begin);
    locate(keys, kc, table, s, g, begin, count);
    locate(values, vc, table, s, g, begin, count);
    for (int64_t i = 0; i < count; ++i) {
      int64_t d = 0;
      for (; d + W <= D; d += W) {
        float lane[W]; store(lane, load(keys[i] + d));
        for (int j = 0; j < W; ++j) kt[(d + j) * kTile + i] = lane[j];
        store(vt + i * DV + d, load(values[i] + d));
      }
      for (; d < D; ++d) { kt[d * kTile + i] = value(keys[i][d]); vt[i * DV + d] = value(values[i][d]); }
    }
    for (int64_t r = 0; r < RP; r += 8) scores_of<8>(score + r * kTile, qf + r * DV, kt, D, DV);
    for (int64_t r = 0; r < R; ++r) {
      int64_t p = position + r / group, low = s.window ? p - s.window + 1 : 0;
      float* x = score + r * kTile;
      if (begin + kTile - 1 > p || begin < low || count < kTile)
        for (int64_t i = 0; i < kTile; ++i)
          if (begin + i > p || begin + i < low) x[i] = -INFINITY;
      float m = std::max(top[r], maximum(larger(load(x), load(x + W))));
      if (m == -INFINITY) {  // nothing of this tile is seen, nor anything before
        decay[r] = 1;
        std::memset(x, 0, sizeof(float) * kTile);
        continue;
      }
      Vec x0 = load(x), x1 = load(x + W), none = splat(-INFINITY);
      Vec e0 = exponential(x0 - m), e1 = exponential(x1 - m);
      e0 = x0 == none ? Vec{} : e0; e1 = x1 == none ? Vec{} : e1;
      decay[r] = std::exp(top[r] - m);
      total[r] = total[r] * decay[r] + sum(e0 + e1);
      top[r] = m;
      store(x, e0); store(x + W, e1);
    }
    for (int64_t r = 0; r < RP; r += 8) weigh<8>(acc + r * DV, score + r * kTile, decay + r, vt, DV, count);
  }
  for (int64_t r = 0; r < R; ++r) {
    T* o = out + ((r / group) * s.H + g * group + r % group) * D;
    for (int64_t d = 0; d < D; ++d) assign(o[d], acc[r * DV + d] / total[r]);
  }
}

template <class T> void paged_attention(const Launch& a, const int64_t* sizes, Team team) {
  T *out = at<T>(a, 0), *q = at<T>(a, 1), *kc = at<T>(a, 2), *vc = at<T>(a, 3);
  const int32_t *tables = at<int32_t>(a, 4), *starts = at<int32_t>(a, 5), *lengths = at<int32_t>(a, 6);
  const int32_t* rows = at<int32_t>(a, 7);
  Attention s(a, sizes, team.num_threads);
  int64_t before = 0, ticket = team.next();
  for (int64_t n = 0; n < sizes[1]; ++n) {
    int64_t tokens = starts[n + 1] - starts[n], pieces = s.pieces(tokens, lengths[n]);
    const int32_t* table = tables + rows[n] * s.M;
    for (; ticket < before + pieces * s.G; ticket = team.next()) {
      // Later pieces see more, so they go first: the last to finish is then a short one.
      int64_t piece = pieces - 1 - (ticket - before) / s.G, g = (ticket - before) % s.G;
      bool is_part = tokens == 1 && pieces > 1;
      int64_t t = is_part ? 0 : piece * s.tokens_per_piece(), count = std::min(s.tokens_per_piece(), tokens - t);
      int64_t position = lengths[n] - tokens + t, offset = (starts[n] + t) * s.H * s.D;
      T *o = out + offset, *qq = q + offset;
      if (is_part) decode_part(o, qq, kc, vc, table, s, g, position, n, piece, before);
      else if (count == 1 && !s.alike) decode_rows(o, qq, kc, vc, table, s, g, position);
      else prefill_rows(o, qq, kc, vc, table, s, g, position, count);
    }
    before += pieces * s.G;
  }
}

// Memory for what threads see apart, as much as the largest launch needs.
void prepare_spread(const Launch* launches, int64_t count, const int64_t* sizes, int64_t num_threads) {
  for (int64_t i = 0; i < count; ++i) {
    const Launch& a = launches[i];
    if (a.kernel / 4 != kPagedAttention) continue;
    Attention s(a, sizes, num_threads);
    if (!s.is_spread) continue;
    const int32_t *starts = at<int32_t>(a, 5), *lengths = at<int32_t>(a, 6);
    int64_t tickets = 0, group = s.H / s.G, DV = (s.D + W - 1) / W * W;
    for (int64_t n = 0; n < sizes[1]; ++n) tickets += s.pieces(starts[n + 1] - starts[n], lengths[n]) * s.G;
    size_t needed = tickets * Seen::floats(group, DV);
    if (spread.memory.size() < needed) spread.memory.resize(needed);
    if (spread.num_counters < sizes[1] * s.G) {
      spread.num_counters = sizes[1] * s.G;
      spread.num_finished.reset(new std::atomic<int64_t>[spread.num_counters]());
    }
  }
}

// ---- greedy_sample: pointers tokens (int64), logits (float32); numbers row stride, vocabulary
int64_t best_of(const float* x, int64_t V) {
  Vec best = splat(-INFINITY), broken{};
  int64_t i = 0;
  for (; i + W <= V; i += W) {
    Vec v = load(x + i);
    best = larger(v, best);
    broken = v != v ? splat(1.f) : broken;
  }
  float top = maximum(best), bad = maximum(broken);
  for (; i < V; ++i) { top = std::max(top, x[i]); bad = x[i] != x[i] ? 1.f : bad; }
  if (bad != 0 || !(top > -INFINITY) || !(top < INFINITY)) return -1;
  for (i = 0; i + W <= V; i += W) {
    VecI equal = load(x + i) == splat(top);
    bool any = false;
    for (int j = 0; j < W; ++j) any |= equal[j] != 0;
    if (any) break;
  }
  for (; i < V; ++i) if (x[i] == top) return i;
  return -1;
}
void greedy_sample(const Launch& a, const int64_t* sizes, Team team) {
  int64_t* tokens = at<int64_t>(a, 0); const float* logits = at<float>(a, 1);
  for (int64_t r; (r = team.next()) < sizes[0];) tokens[r] = best_of(logits + r * a.numbers[0], a.numbers[1]);
}

// ---- sample: pointers tokens (int64), logits, temperature, top_k (int32), top_p, min_p, seeds (int64), choices (int32),
// positions (int32); numbers row stride, vocabulary

// Four words for each of 16 counters (position, choice, number, 0), Philox4x32-10.
typedef uint64_t VecL __attribute__((vector_size(128)));
inline void multiply(VecU& high, VecU& low, VecU a, uint64_t by) {
  VecL product = __builtin_convertvector(a, VecL) * by;
  high = __builtin_convertvector(product >> 32, VecU);
  low = __builtin_convertvector(product & 0xFFFFFFFFu, VecU);
}
inline void random_words(VecU* c, uint64_t seed, uint32_t choice, uint32_t position, VecU numbers) {
  c[0] = VecU{} + position; c[1] = VecU{} + choice; c[2] = numbers; c[3] = VecU{};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    VecU high0, low0, high1, low1;
    multiply(high0, low0, c[0], 0xD2511F53u);
    multiply(high1, low1, c[2], 0xCD9E8D57u);
    VecU next = high1 ^ c[1] ^ k0;
    c[2] = high0 ^ c[3] ^ k1; c[1] = low1; c[3] = low0; c[0] = next;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
}

// log to 1e-7 of itself, also near 1. Where x is from sqrt(1/2) to 1 and a finer 1 - x is known, it goes in as `less`.
inline Vec logarithm(Vec x, const Vec* less) {
  VecI bits = (VecI)x, n = (bits - 0x3F3504F3) >> 23;
  Vec r = (Vec)(bits - (n << 23)) - 1.f;
  if (less) r = n == VecI{} ? -*less : r;
  Vec p = splat(7.0376836292e-2f), square = r * r;
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  return __builtin_convertvector(n, Vec) * 0.6931471805599453f + (r + (p * r * square - .5f * square));
}
// Gumbel noise, from -3.2 to 22.9. It passes through memory, so that no sum is reordered into it.
inline Vec gumbel(VecU word) {
  Vec v = (__builtin_convertvector(word, Vec) + .5f) * 0x1p-32f;
  Vec waited = -logarithm((__builtin_convertvector(~word, Vec) + .5f) * 0x1p-32f, &v);
  Vec noise = -logarithm(waited, nullptr);
  __asm__("" : "+m"(noise));
  return noise;
}

// Smallest kept weight so that the larger ones alone do not reach `mass`: bins narrow it down, one bin is sorted.
float nucleus_cutoff(const float* weights, int64_t V, double mass) {
  constexpr int kBins = 2048;
  std::vector<double> sums(kBins, 0.);
  auto bin = [](float w) { uint32_t u; std::memcpy(&u, &w, 4); return int(u >> 20) & (kBins - 1); };
  for (int64_t i = 0; i < V; ++i) if (weights[i] > 0) sums[bin(weights[i])] += weights[i];
  double before = 0;
  int b = kBins - 1;
  for (; b > 0 && (sums[b] == 0 || before + sums[b] < mass); --b) before += sums[b];
  std::vector<float> inside;
  for (int64_t i = 0; i < V; ++i) if (weights[i] > 0 && bin(weights[i]) == b) inside.push_back(weights[i]);
  std::sort(inside.begin(), inside.end(), std::greater<float>());
  float cutoff = inside.empty() ? 0.f : inside[0];
  for (float w : inside) { if (before >= mass) break; cutoff = w; before += w; }
  return cutoff;
}
// The smallest logit of the nucleus of those from `low` on.
float nucleus_low(float* w, const float* x, int64_t V, float top, float low, float top_p) {
  Vec sums{};
  for (int64_t i = 0; i < V; i += W) {
    Vec v = load(x + i);
    v = v < splat(low) || v < splat(top - 80.f) ? Vec{} : exponential(v - top);
    store(w + i, v); sums += v;
  }
  float cutoff = nucleus_cutoff(w, V, double(top_p) * sum(sums)), least = top;
  for (int64_t i = 0; i < V; ++i) if (w[i] >= cutoff && x[i] >= low && x[i] < least) least = x[i];
  return least;
}
// The id of the largest sum of a logit from `low` on and its noise; the first of equals. Words of entries that cannot
// win, because even the largest noise is not enough, are not made.
int64_t drawn(const float* x, int64_t V, float top, float low, uint64_t seed, uint32_t choice, uint32_t position) {
  float best = -INFINITY, bound = top - 3.2f;
  int64_t token = -1;
  VecU lanes;
  for (int j = 0; j < W; ++j) lanes[j] = j;
  for (int64_t n = 0; n / 1024 * 4096 < V; n += W) {
    int64_t first = n / 1024 * 4096 + n % 1024;
    if (first >= V) continue;
    Vec most = splat(-INFINITY);
    for (int q = 0; q < 4 && first + q * 1024 < V; ++q) most = larger(most, load(x + first + q * 1024));
    float highest = maximum(most);
    if (highest < low || highest + 23.f < bound) continue;
    VecU words[4];
    random_words(words, seed, choice, position, lanes + uint32_t(n));
    // Noise is at most -log(v), so that only words with v up to exp(highest - bound) can win: most need no logarithm.
    float reach = std::exp(highest - bound) * 0x1.001p32f;
    uint32_t limit = reach < 4294967040.f ? uint32_t(reach) + 1 : 0xFFFFFFFFu;
    for (int q = 0; q < 4 && first + q * 1024 < V; ++q) {
      VecI can_win = words[q] <= limit;
      if (!any(can_win)) continue;
      int64_t id = first + q * 1024;
      Vec v = load(x + id), total = v + gumbel(words[q]);
      total = v < splat(low) ? splat(-INFINITY) : total;
      if (maximum(total) < best) continue;
      for (int j = 0; j < W; ++j)
        if (total[j] > best || (total[j] == best && id + j < token)) { best = total[j]; token = id + j; }
    }
    bound = std::max(bound, best);
  }
  return token;
}
void sample(const Launch& a, const int64_t* sizes, Team team) {
  int64_t stride = a.numbers[0], V = a.numbers[1], VP = (V + W - 1) / W * W;
  int64_t* tokens = at<int64_t>(a, 0); const int64_t* seeds = at<int64_t>(a, 6);
  const int32_t *top_k = at<int32_t>(a, 3), *choices = at<int32_t>(a, 7), *positions = at<int32_t>(a, 8);
  const float *temperature = at<float>(a, 2), *top_p = at<float>(a, 4), *min_p = at<float>(a, 5);
  for (int64_t r; (r = team.next()) < sizes[0];) {
    const float* logits = at<float>(a, 1) + r * stride;
    int64_t best = best_of(logits, V);
    tokens[r] = best;
    if (best < 0 || temperature[r] < 1e-4f) continue;
    float *x = scratch(2 * VP), *more = x + VP;
    double inverse = 1. / double(temperature[r]);  // rounded to float32, a product is as the quotient would be
    for (int64_t i = 0; i < V; ++i) x[i] = float(logits[i] * inverse);
    for (int64_t i = V; i < VP; ++i) x[i] = -INFINITY;
    float top = x[best], low = -INFINITY;
    if (!(top > -INFINITY && top < INFINITY)) { tokens[r] = -1; continue; }
    if (top_k[r] > 0 && top_k[r] < V) {
      std::memcpy(more, x, sizeof(float) * V);
      std::nth_element(more, more + top_k[r] - 1, more + V, std::greater<float>());
      low = more[top_k[r] - 1];
    }
    if (top_p[r] < 1.f) low = nucleus_low(more, x, V, top, low, top_p[r]);
    if (min_p[r] > 0.f) {
      double least = double(top) + std::log(double(min_p[r]));
      float nearest = float(least);
      low = std::max(low, double(nearest) < least ? std::nextafter(nearest, INFINITY) : nearest);
    }
    tokens[r] = drawn(x, V, top, low, uint64_t(seeds[r]), uint32_t(choices[r]), uint32_t(positions[r]));
  }
}

void execute(const Launch& a, const int64_t* sizes, Team team) {
#define DTYPES(name) \
  switch (a.kernel % 4) { case 0: name<float>(a, sizes, team); return; case 1: name<Bf16>(a, sizes, team); return; \
                          default: name<Fp16>(a, sizes, team); return; }
  switch (a.kernel / 4) {
    case 0: DTYPES(embed)
    case 1: DTYPES(norm)
    case 2: DTYPES(silu_and_mul)
    case 3: DTYPES(rotary_and_kv_write)
    case 4:
      if (a.kernel % 4 == 0 && a.numbers[4] == 1) { linear<float, Bf16>(a, sizes, team); return; }
      DTYPES(linear)
    case kPagedAttention: DTYPES(paged_attention)
    case 6: greedy_sample(a, sizes, team); return;
    case 7: sample(a, sizes, team); return;
  }
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Where threads meet between launches. Short waits spin; longer ones sleep, since another process may need the core.
class Meeting {
 public:
  explicit Meeting(int64_t num_threads) : num_threads_(num_threads) {}
  void meet() {
    int32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      phase_.notify_all();
      return;
    }
    for (int spins = 0; spins < 3000; ++spins) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      pause();
    }
    phase_.wait(phase, std::memory_order_acquire);
  }

 private:
  int64_t num_threads_;
  std::atomic<int64_t> arrived_{0};
  std::atomic<int32_t> phase_{0};
};

// Threads that meet hundreds of times in a pass may be slower than one thread when another process takes a core away: each
// meeting then waits for a time slice. A pass in which some thread ran for much less than the pass took, and which took no
// less than one thread takes alone, is such a case: the following passes run on one thread, more of them each time it
// happens again, but never so many that the end of the crowd goes unnoticed for long.
class Crowding {
 public:
  int64_t threads(int64_t asked, bool is_pass) {
    if (num_alone_ == 0) return asked;
    num_alone_ -= is_pass;
    return 1;
  }
  void observe_alone(int64_t num_tokens, double wall_s) {
    double& known = alone_s(num_tokens);
    known = known == 0 ? wall_s : .7 * known + .3 * wall_s;
  }
  void observe(int64_t num_tokens, double least_cpu_s, double wall_s) {
    if (least_cpu_s < 0.7 * wall_s && wall_s > 0.9 * alone_s(num_tokens)) {
      pause_ = std::min<int64_t>(16, pause_ * 2);
      num_alone_ = pause_;
    } else {
      pause_ = 1;
    }
  }

 private:
  double& alone_s(int64_t num_tokens) { return alone_s_[std::min(15, 63 - __builtin_clzll(num_tokens | 1))]; }
  double alone_s_[16] = {};  // by the number of tokens, in powers of two
  int64_t num_alone_ = 0, pause_ = 1;
};
Crowding crowding;

inline double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

template <class T> void pack_panels(T* out, const T* w, int64_t N, int64_t K, int64_t stride, int64_t pair) {
#pragma omp parallel for
  for (int64_t panel = 0; panel < (N + NR - 1) / NR; ++panel)
    for (int64_t k = 0; k < K; ++k)
      for (int64_t j = 0; j < NR; ++j) {
        int64_t n = panel * NR + j;
        out[panel * NR * K + (k / pair * NR + j) * pair + k % pair] = n < N ? w[n * stride + k] : T{};
      }
}

}  // namespace

extern "C" {

int64_t trimaran_launch_bytes() { return sizeof(Launch); }

// Run `count` launches in order on `num_threads` threads; `progress`, when given, counts the finished ones.
void trimaran_run(const Launch* launches, int64_t count, const int64_t* sizes, int64_t num_threads, int64_t* progress) {
  constexpr int64_t kPass = 8;  // launches from which a run counts as a pass
  bool is_pass = count >= kPass && num_threads > 1;
  num_threads = crowding.threads(num_threads, is_pass);
  double began = seconds(CLOCK_MONOTONIC), least_cpu = INFINITY;
  if (num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) {
      execute(launches[i], sizes, Team{0, 1, nullptr});
      if (progress) __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
    }
    if (is_pass) crowding.observe_alone(sizes[0], seconds(CLOCK_MONOTONIC) - began);
    return;
  }
  prepare_spread(launches, count, sizes, num_threads);
  std::unique_ptr<std::atomic<int64_t>[]> tickets(new std::atomic<int64_t>[count]());
  std::unique_ptr<Meeting> meeting;
#pragma omp parallel num_threads(num_threads)
  {
    int team_size = omp_get_num_threads(), thread = omp_get_thread_num();
#pragma omp single
    meeting.reset(new Meeting(team_size));
    double cpu_began = seconds(CLOCK_THREAD_CPUTIME_ID);
    for (int64_t i = 0; i < count; ++i) {
      execute(launches[i], sizes, Team{thread, team_size, &tickets[i]});
      if (count > 1 && team_size > 1) meeting->meet();
      if (progress && thread == 0) __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
    }
    double cpu = seconds(CLOCK_THREAD_CPUTIME_ID) - cpu_began;
#pragma omp critical
    least_cpu = std::min(least_cpu, cpu);
  }
  if (is_pass) crowding.observe(sizes[0], least_cpu, seconds(CLOCK_MONOTONIC) - began);
}

int64_t trimaran_packed_elements(int64_t N, int64_t K) { return (N + NR - 1) / NR * NR * K; }

// Lay a weight [N, K] out in panels (see `linear`). Element size and pairing follow the dtype.
void trimaran_pack(void* out, const void* weight, int64_t N, int64_t K, int64_t stride, int64_t dtype) {
  if (dtype == 0) pack_panels((uint32_t*)out, (const uint32_t*)weight, N, K, stride, 1);
  else pack_panels((uint16_t*)out, (const uint16_t*)weight, N, K, stride, dtype == 1 ? 2 : 1);
}

}
