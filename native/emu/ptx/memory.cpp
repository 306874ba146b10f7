// Loads, stores, cp.async and the write log.
#include "memory.h"

#include "ops.h"

namespace flowgpu::emu::ptx {

void WriteLog::compact() {
    std::sort(raw_.begin(), raw_.end(),
              [](const Range& a, const Range& b) { return a.addr < b.addr; });
    size_t kept = 0;
    for (const Range& range : raw_) {
        if (kept > 0 && range.addr <= raw_[kept - 1].addr + raw_[kept - 1].size) {
            Range& last = raw_[kept - 1];
            last.size = std::max(last.size, range.addr + range.size - last.addr);
        } else {
            raw_[kept++] = range;
        }
    }
    raw_.resize(kept);
    limit_ = std::max<size_t>(1 << 16, 2 * kept);
}

uint8_t* Machine::device_miss(uint64_t addr, uint64_t size, bool write) {
    AddressSpace::Range range;
    if (!memory.find(addr, &range) || addr < range.begin || addr >= range.end ||
        size > range.end - addr || (write && !range.writable)) {
        return nullptr;
    }
    ranges[next_victim] = range;
    next_victim = (next_victim + 1) % cached;
    return range.host + (addr - range.begin);
}

uint8_t* locate(Cta& c, Space space, uint64_t addr, uint64_t size, uint32_t align, uint32_t lane,
                bool write) {
    uint64_t at = addr;
    if (space == Space::generic) {
        if (at >= shared_window && at < shared_window + window_bytes) {
            space = Space::shared;
            at -= shared_window;
        } else if (at >= local_window && at < local_window + window_bytes) {
            space = Space::local;
            at -= local_window;
        } else if (at >= param_window && at < param_window + window_bytes) {
            space = Space::param;
            at -= param_window;
        } else {
            space = Space::global;
        }
    }
    const bool aligned = (at & (align - 1)) == 0;
    uint8_t* host = nullptr;
    auto within = [&](uint64_t limit) { return at < limit && size <= limit - at; };
    if (space == Space::global) {
        host = c.m.device(at, size, write);
    } else if (space == Space::shared && within(c.m.shared_bytes)) {
        host = c.shared.data() + at;
    } else if (space == Space::local && within(c.m.function.local_bytes)) {
        host = c.local.data() + static_cast<size_t>(lane) * c.m.function.local_bytes + at;
    } else if (space == Space::param && !write && within(c.m.function.param_bytes)) {
        host = const_cast<uint8_t*>(c.m.launch.params) + at;
    }
    // Measured: of memory of the device, whether it may be accessed is looked at first.
    if (!aligned && (host || space != Space::global)) {
        c.raise(Result::Code::misaligned_address, addr, lane);
        return nullptr;
    }
    if (!host) {
        c.raise(Result::Code::illegal_address, addr, lane);
    }
    return host;
}

namespace {

struct Addresses {
    uint64_t at[warp_size];
    bool consecutive = false, uniform = false;

    // Takes the addresses of a whole warp, whose lanes access `stride` bytes each.
    Addresses(const Cta& c, const Ins& i, uint32_t base, uint64_t stride) {
        if (i.wide_address) {
            const uint64_t* r = c.reg<uint64_t>(i.op[0]) + base;
            for (uint32_t l = 0; l < warp_size; ++l) {
                at[l] = r[l] + static_cast<uint64_t>(i.imm);
            }
        } else {
            const uint32_t* r = c.reg<uint32_t>(i.op[0]) + base;
            for (uint32_t l = 0; l < warp_size; ++l) {
                at[l] = r[l] + static_cast<uint64_t>(i.imm);
            }
        }
        uint64_t gap = 0, spread = 0;
        for (uint32_t l = 0; l < warp_size; ++l) {
            gap |= at[l] ^ (at[0] + l * stride);
            spread |= at[l] ^ at[0];
        }
        consecutive = gap == 0;
        uniform = spread == 0;
    }
};

bool per_lane_storage(Space space, uint64_t addr) {
    return space == Space::local ||
           (space == Space::generic && addr >= local_window && addr < local_window + window_bytes);
}

template <class M> M read(const uint8_t* host) {
    M value;
    std::memcpy(&value, host, sizeof value);
    return value;
}

// M: type in memory, R: register; op[0] is the address, op[1..count] the elements.
template <class M, class R> void load(Cta& c, const Ins& i, const Mask& m) {
    const uint32_t count = i.count;
    const uint64_t bytes = count * sizeof(M);
    for (uint32_t k = 0; k < c.warps; ++k) {
        uint32_t bits = m.w[k], base = k * warp_size;
        if (bits == ~0u) {
            Addresses a(c, i, base, bytes);
            bool own = per_lane_storage(i.space, a.at[0]);
            if ((a.consecutive || a.uniform) && !own) {
                const uint8_t* host =
                    locate(c, i.space, a.at[0], a.uniform ? bytes : warp_size * bytes,
                           static_cast<uint32_t>(bytes), base, false);
                // A warp that straddles two mappings is looked at lane by lane.
                if (host) {
                    const size_t step = a.uniform ? 0 : count;
                    for (uint32_t e = 0; e < count; ++e) {
                        R* d = c.reg<R>(i.op[1 + e]) + base;
                        const M* s = reinterpret_cast<const M*>(host) + e;
                        if (step == 1) {
                            for (uint32_t l = 0; l < warp_size; ++l) {
                                d[l] = static_cast<R>(s[l]);
                            }
                        } else {
                            for (uint32_t l = 0; l < warp_size; ++l) {
                                d[l] = static_cast<R>(s[l * step]);
                            }
                        }
                    }
                    continue;
                }
                c.m.fault = {};
            }
        }
        for (; bits != 0; bits &= bits - 1) {
            uint32_t l = base + static_cast<uint32_t>(__builtin_ctz(bits));
            const uint8_t* host = locate(c, i.space, address_of(c, i, i.op[0], l), bytes,
                                         static_cast<uint32_t>(bytes), l, false);
            if (!host) {
                return;
            }
            for (uint32_t e = 0; e < count; ++e) {
                c.reg<R>(i.op[1 + e])[l] = static_cast<R>(read<M>(host + e * sizeof(M)));
            }
        }
    }
}

template <class M, class R> void store(Cta& c, const Ins& i, const Mask& m) {
    const uint32_t count = i.count;
    const uint64_t bytes = count * sizeof(M);
    WriteLog* log = c.m.launch.log;
    for (uint32_t k = 0; k < c.warps; ++k) {
        uint32_t bits = m.w[k], base = k * warp_size;
        if (bits == ~0u) {
            Addresses a(c, i, base, bytes);
            if (a.consecutive && !per_lane_storage(i.space, a.at[0])) {
                uint8_t* host = locate(c, i.space, a.at[0], warp_size * bytes,
                                       static_cast<uint32_t>(bytes), base, true);
                if (host) {
                    for (uint32_t e = 0; e < count; ++e) {
                        const R* s = c.reg<R>(i.op[1 + e]) + base;
                        M* d = reinterpret_cast<M*>(host) + e;
                        for (uint32_t l = 0; l < warp_size; ++l) {
                            d[l * count] = static_cast<M>(s[l]);
                        }
                    }
                    if (log && is_device(i.space, a.at[0])) {
                        log->add(a.at[0], warp_size * bytes);
                    }
                    continue;
                }
                c.m.fault = {};
            }
        }
        for (; bits != 0; bits &= bits - 1) {
            uint32_t l = base + static_cast<uint32_t>(__builtin_ctz(bits));
            uint64_t addr = address_of(c, i, i.op[0], l);
            uint8_t* host = locate(c, i.space, addr, bytes, static_cast<uint32_t>(bytes), l, true);
            if (!host) {
                return;
            }
            for (uint32_t e = 0; e < count; ++e) {
                M value = static_cast<M>(c.reg<R>(i.op[1 + e])[l]);
                std::memcpy(host + e * sizeof(M), &value, sizeof value);
            }
            if (log && is_device(i.space, addr)) {
                log->add(addr, bytes);
            }
        }
    }
}

// cp.async is complete at once, which every wait allows. op: shared address, global address and,
// for the sized form, the number of bytes to read; `count` is the number of bytes to write.
template <bool sized> void async_copy(Cta& c, const Ins& i, const Mask& m) {
    const uint32_t bytes = i.count;
    for_lanes(c, m, [&](uint32_t l) {
        if (c.m.fault.code != Result::Code::ok) {
            return;
        }
        uint64_t to = (i.wide_address ? c.reg<uint64_t>(i.op[0])[l] : c.reg<uint32_t>(i.op[0])[l]) +
                      static_cast<uint64_t>(i.imm);
        uint64_t from = c.reg<uint64_t>(i.op[1])[l] + i.aux;
        uint32_t valid = sized ? std::min(c.reg<uint32_t>(i.op[2])[l], bytes) : bytes;
        uint8_t* d = locate(c, Space::shared, to, bytes, bytes, l, true);
        if (!d) {
            return;
        }
        if ((from & (bytes - 1)) != 0) {
            c.raise(Result::Code::misaligned_address, from, l);
            return;
        }
        const uint8_t* s = valid ? locate(c, Space::global, from, valid, 1, l, false) : nullptr;
        if (s || valid == 0) {
            std::memset(d + valid, 0, bytes - valid);
            if (s) {
                std::memcpy(d, s, valid);
            }
        }
    });
}

template <class M> Handler load_into(uint32_t bytes) {
    return bytes == 2 && sizeof(M) <= 2   ? load<M, uint16_t>
           : bytes == 4 && sizeof(M) <= 4 ? load<M, uint32_t>
           : bytes == 8                   ? load<M, uint64_t>
                                          : nullptr;
}
template <class M> Handler store_from(uint32_t bytes) {
    return bytes == 2 && sizeof(M) <= 2   ? store<M, uint16_t>
           : bytes == 4 && sizeof(M) <= 4 ? store<M, uint32_t>
           : bytes == 8                   ? store<M, uint64_t>
                                          : nullptr;
}

} // namespace

Handler find_load(Type type, uint32_t register_bytes) {
    switch (size_of(type)) {
    case 1:
        return is_signed(type) ? load_into<int8_t>(register_bytes)
                               : load_into<uint8_t>(register_bytes);
    case 2:
        return is_signed(type) ? load_into<int16_t>(register_bytes)
                               : load_into<uint16_t>(register_bytes);
    case 4:
        return is_signed(type) ? load_into<int32_t>(register_bytes)
                               : load_into<uint32_t>(register_bytes);
    case 8:
        return load_into<uint64_t>(register_bytes);
    default:
        return nullptr;
    }
}

Handler find_store(Type type, uint32_t register_bytes) {
    switch (size_of(type)) {
    case 1:
        return store_from<uint8_t>(register_bytes);
    case 2:
        return store_from<uint16_t>(register_bytes);
    case 4:
        return store_from<uint32_t>(register_bytes);
    case 8:
        return store_from<uint64_t>(register_bytes);
    default:
        return nullptr;
    }
}

Handler find_async_copy(bool sized) {
    return sized ? async_copy<true> : async_copy<false>;
}

} // namespace flowgpu::emu::ptx
