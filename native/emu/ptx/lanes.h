// Loops over the active lanes of a CTA, and handlers made from a function of one lane.
#pragma once

#include <utility>

#include "code.h"

namespace flowgpu::emu::ptx {

// f(lane) for every lane of the mask; whole warps run as a counted loop that the compiler
// vectorises. The only aliasing is a destination that is also a source, lane by lane: ivdep holds.
template <class F>
inline __attribute__((always_inline)) void for_lanes(const Cta& c, const Mask& m, F f) {
    for (uint32_t k = 0; k < c.warps; ++k) {
        uint32_t bits = m.w[k];
        uint32_t base = k * warp_size;
        if (bits == ~0u) {
#pragma GCC ivdep
            for (uint32_t l = 0; l < warp_size; ++l) {
                f(base + l);
            }
        } else {
            for (; bits != 0; bits &= bits - 1) {
                f(base + static_cast<uint32_t>(__builtin_ctz(bits)));
            }
        }
    }
}

namespace detail {
template <class F, class R, class... A, size_t... I>
inline __attribute__((always_inline)) void apply(Cta& c, const Ins& i, const Mask& m, R (*)(A...),
                                                 std::index_sequence<I...>) {
    R* d = c.reg<R>(i.op[0]);
    auto run = [&](const A*... s) __attribute__((always_inline)) {
        for_lanes(c, m, [=](uint32_t l) __attribute__((always_inline)) { d[l] = F::run(s[l]...); });
    };
    run(c.reg<const A>(i.op[I + 1])...);
}
template <class R, class... A> constexpr auto indices(R (*)(A...)) {
    return std::index_sequence_for<A...>();
}
} // namespace detail

// d = F::run(a, b, ...); the storage types of the registers are those of run's signature.
template <class F> void elementwise(Cta& c, const Ins& i, const Mask& m) {
    detail::apply<F>(c, i, m, &F::run, detail::indices(&F::run));
}

} // namespace flowgpu::emu::ptx
