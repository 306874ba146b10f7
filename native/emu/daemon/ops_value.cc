// Words of memory that a stream writes, and waits for.
#include "state.h"

#include <thread>

namespace flowgpu::emu {

namespace {

struct ValueOperation {
    bool write = false;
    bool wide = false;
    uint64_t address = 0;
    uint64_t value = 0;
    unsigned flags = 0; // of a wait

    uint64_t bytes() const { return wide ? 8 : 4; }
};

// False for one that no driver knows. A barrier or flush does nothing here.
bool read(const CUstreamBatchMemOpParams& params, std::vector<ValueOperation>* out) {
    ValueOperation one;
    switch (params.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        break;
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        one.wide = true;
        break;
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        one.write = true;
        break;
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        one.write = one.wide = true;
        break;
    case CU_STREAM_MEM_OP_BARRIER:
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
        return true;
    default:
        return false;
    }
    one.address = params.waitValue.address;
    one.value = one.wide ? params.waitValue.value64 : params.waitValue.value;
    one.flags = params.waitValue.flags;
    const unsigned most = one.write ? 0 : CU_STREAM_WAIT_VALUE_NOR;
    if (one.flags > most) {
        return false;
    }
    out->push_back(one);
    return true;
}

// The word, in the device's memory or in memory of the host that it may reach; null for neither.
using Word = std::function<bool(uint64_t* value, bool write)>;

Word word_of(Client& client, const Context& context, const ValueOperation& one) {
    std::vector<Segment> found;
    const auto view = client.space.view();
    const Mapping* map = client.space.at(one.address);
    if (map != nullptr && map->pool != 0) {
        return nullptr; // measured: memory of a pool is none for words
    }
    if (view->resolve(one.address, one.bytes(), 1u << context.device->index, one.write, &found)) {
        return [view, at = found.front().host, wide = one.wide](uint64_t* value, bool write) {
            if (wide && write) {
                __atomic_store_n(reinterpret_cast<uint64_t*>(at), *value, __ATOMIC_SEQ_CST);
            } else if (wide) {
                *value = __atomic_load_n(reinterpret_cast<uint64_t*>(at), __ATOMIC_SEQ_CST);
            } else if (write) {
                __atomic_store_n(reinterpret_cast<uint32_t*>(at), static_cast<uint32_t>(*value),
                                 __ATOMIC_SEQ_CST);
            } else {
                *value = __atomic_load_n(reinterpret_cast<uint32_t*>(at), __ATOMIC_SEQ_CST);
            }
            return true;
        };
    }
    if (client.host_range(one.address, one.bytes()) == nullptr) {
        return nullptr;
    }
    return [pid = client.pid, address = one.address, bytes = one.bytes()](uint64_t* value,
                                                                          bool write) {
        auto* word = reinterpret_cast<uint8_t*>(value);
        return write ? write_client(pid, address, word, bytes)
                     : read_client(pid, address, word, bytes);
    };
}

bool is_met(const ValueOperation& one, uint64_t value) {
    switch (one.flags) {
    case CU_STREAM_WAIT_VALUE_EQ:
        return value == one.value;
    case CU_STREAM_WAIT_VALUE_AND:
        return (value & one.value) != 0;
    case CU_STREAM_WAIT_VALUE_NOR:
        return one.wide ? ~(value | one.value) != 0
                        : static_cast<uint32_t>(~(value | one.value)) != 0;
    default: // cyclic
        return one.wide ? static_cast<int64_t>(value - one.value) >= 0
                        : static_cast<int32_t>(value - one.value) >= 0;
    }
}

} // namespace

int32_t op_StreamValues(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    std::vector<ValueOperation> operations;
    for (auto left = s.in.take<uint32_t>(); left > 0 && s.in.good(); --left) {
        if (!read(s.in.take<CUstreamBatchMemOpParams>(), &operations)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    std::vector<Word> words;
    for (const ValueOperation& one : operations) {
        words.push_back(word_of(s.client, *stream->context, one));
        if (words.back() == nullptr || one.address % one.bytes() != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (stream->capture != nullptr) {
        s.machine().count_unsupported("memory operations in a capture");
        s.breaks_capture(*stream);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    submit(s.client, stream, [context = stream->context, operations, words] {
        for (size_t i = 0; i < words.size(); ++i) {
            uint64_t value = operations[i].value;
            if (operations[i].write) {
                words[i](&value, true);
                continue;
            }
            while (words[i](&value, false) && !is_met(operations[i], value) && !context->cancel) {
                std::this_thread::sleep_for(std::chrono::microseconds(100));
            }
        }
    });
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
