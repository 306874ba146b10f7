// EXPORT, HANDOVER, LEND, MAPBACK, ROOM and DROP: where the program's device memory is. WRITTEN:
// what writes it.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include <unistd.h>

#include "contexts.h"
#include "device_writes.h"
#include "gate.h"
#include "ipc.h"
#include "nvml.h"
#include "requests.h"
#include "task.h"
#include "watch.h"

namespace flowgpu::service {

namespace {

constexpr int kGhostAnswerMs = 60'000;

int handover = -1; // the channel of EXPORT or MAPBACK
bool lent = false; // it has confirmed LEND, and the gate has been closed since

// Makes a context current in this thread for driver calls that want one, and takes it away again.
class CurrentContext {
  public:
    CurrentContext() {
        auto contexts = task().memory.contexts();
        if (!contexts.empty())
            FG_REAL(cuCtxSetCurrent)(*contexts.begin());
    }
    ~CurrentContext() { FG_REAL(cuCtxSetCurrent)(nullptr); }
};

void add_totals(flowgpu_reply& reply) {
    MemoryTotals totals = task().memory.totals();
    reply.blocks = totals.blocks;
    reply.block_bytes = totals.block_bytes;
    reply.allocations = totals.allocations;
    reply.allocation_bytes = totals.allocation_bytes;
}

// Collects rows and descriptors into packets of FLOWGPU_ROWS_PER_MESSAGE; owns the descriptors
// until they are sent.
class BlockSender {
  public:
    ~BlockSender() { drop(); }
    bool add(const Block& block, int fd) {
        rows_[count_] = flowgpu_block{block.id,
                                      block.address,
                                      block.bytes,
                                      static_cast<uint32_t>(block.device),
                                      0,
                                      block.origin.owner.low,
                                      block.origin.owner.high,
                                      block.origin.id};
        fds_[count_++] = fd;
        return count_ < FLOWGPU_ROWS_PER_MESSAGE || flush();
    }
    bool flush() {
        if (!count_)
            return true;
        uint32_t bytes =
            static_cast<uint32_t>(sizeof(flowgpu_header) + count_ * sizeof(flowgpu_block));
        message_.header = make_header(FLOWGPU_BLOCKS, bytes, count_);
        memcpy(message_.rows, rows_, count_ * sizeof(flowgpu_block));
        bool sent = send_packet(handover, &message_, bytes, fds_, count_);
        drop();
        return sent;
    }

  private:
    void drop() {
        for (uint32_t i = 0; i < count_; i++)
            close(fds_[i]);
        count_ = 0;
    }
    struct {
        flowgpu_header header;
        flowgpu_block rows[FLOWGPU_ROWS_PER_MESSAGE];
    } message_;
    flowgpu_block rows_[FLOWGPU_ROWS_PER_MESSAGE];
    int fds_[FLOWGPU_ROWS_PER_MESSAGE];
    uint32_t count_ = 0;
};

bool send_blocks(flowgpu_reply& reply) {
    CurrentContext context;
    ManyDescriptors many;
    BlockSender sender;
    CUresult result = task().memory.send_new(
        [&sender](const Block& block, int fd) { return sender.add(block, fd); });
    if (result == CUDA_SUCCESS && !sender.flush())
        result = CUDA_ERROR_OPERATING_SYSTEM;
    if (result == CUDA_ERROR_OPERATING_SYSTEM)
        fail(reply, FLOWGPU_SYSTEM, "the ghost does not take the memory over");
    else if (result != CUDA_SUCCESS)
        fail_driver(reply, "exporting device memory", result);
    return reply.status == FLOWGPU_OK;
}

// In packets of at most `most` rows.
template <uint32_t most, class Row>
bool send_rows(int socket, flowgpu_message type, const std::vector<Row>& rows) {
    static struct {
        flowgpu_header header;
        Row rows[most];
    } message;
    for (size_t start = 0; start < rows.size(); start += most) {
        const size_t count = std::min<size_t>(most, rows.size() - start);
        const auto bytes = static_cast<uint32_t>(sizeof(flowgpu_header) + count * sizeof(Row));
        message.header = make_header(type, bytes, static_cast<uint32_t>(count));
        memcpy(message.rows, rows.data() + start, count * sizeof(Row));
        if (!send_packet(socket, &message, bytes))
            return false;
    }
    return true;
}

bool send_askers() {
    return send_rows<FLOWGPU_ASKERS_PER_MESSAGE>(handover, FLOWGPU_ASKERS, ipc::askers());
}

bool send_allocations() {
    std::vector<flowgpu_allocation> rows;
    task().memory.for_each_allocation([&rows](const LiveRange& range) {
        rows.push_back(flowgpu_allocation{range.address, range.bytes, range.place});
    });
    return send_rows<FLOWGPU_ALLOCATIONS_PER_MESSAGE>(handover, FLOWGPU_ALLOCATIONS, rows);
}

bool send_host_memory() {
    std::vector<flowgpu_host> rows;
    for (const pinned::Range& range :
         device_writes::begun() ? device_writes::noted() : std::vector<pinned::Range>())
        rows.push_back(flowgpu_host{range.start, range.end - range.start});
    return send_rows<FLOWGPU_HOST_ROWS_PER_MESSAGE>(handover, FLOWGPU_HOST, rows);
}

bool send_live_list() {
    flowgpu_header end = make_header(FLOWGPU_END, sizeof end);
    return send_rows<FLOWGPU_IDS_PER_MESSAGE>(handover, FLOWGPU_LIVE, task().memory.live_ids()) &&
           send_packet(handover, &end, sizeof end);
}

// `release`: or the task goes on with its memory.
void hand_over(Packet& packet, flowgpu_reply& reply, bool release) {
    if (handover < 0 || !gate::is_closed() || !task().memory.all_present())
        return fail(reply, FLOWGPU_PROTOCOL, "HANDOVER needs EXPORT, a closed gate and the memory");
    if (!send_blocks(reply))
        return;
    if (!send_askers() || !send_allocations() || !send_host_memory() || !send_live_list())
        return fail(reply, FLOWGPU_SYSTEM, "the ghost does not take the memory over");
    // Only now may the task let go: the ghost says that it holds every block.
    Received got = receive_packet(handover, &packet, kGhostAnswerMs);
    if (got != Received::ok || packet.header().type != FLOWGPU_END)
        return fail(reply, FLOWGPU_SYSTEM, "the ghost did not confirm that it holds the memory");
    if (release) {
        CurrentContext context;
        CUresult result = task().memory.release_all();
        if (result != CUDA_SUCCESS)
            fail_driver(reply, "letting go of device memory", result);
    }
    add_totals(reply);
}

} // namespace

void close_handover() {
    if (handover >= 0)
        close(handover);
    handover = -1;
    lent = false;
}

bool memory_is_safe() {
    return lent || !task().memory.all_present() || task().memory.totals().blocks == 0;
}

void on_export(Packet& packet, flowgpu_reply& reply) {
    if (packet.fd_count != 1 || gate::is_closed())
        return fail(reply, FLOWGPU_PROTOCOL, "EXPORT carries one descriptor and an open gate");
    close_handover();
    nvml::lead_to_guards();
    handover = packet.take_fd(0);
    task().memory.forget_sent();
    if (packet.header().count == FLOWGPU_EXPORT_NOTES_NONE)
        device_writes::end();
    if (packet.header().count == FLOWGPU_EXPORT_NOTES_BEGIN)
        device_writes::begin();
    if (send_blocks(reply) && !send_askers())
        fail(reply, FLOWGPU_SYSTEM, "the ghost does not take the memory over");
    add_totals(reply);
}

void on_handover(Packet& packet, flowgpu_reply& reply) {
    hand_over(packet, reply, true);
}

void on_lend(Packet& packet, flowgpu_reply& reply) {
    hand_over(packet, reply, false);
    lent = reply.status == FLOWGPU_OK;
}

void on_mapback(Packet& packet, flowgpu_reply& reply) {
    close_handover();
    if (packet.fd_count != 1)
        return fail(reply, FLOWGPU_PROTOCOL, "MAPBACK carries one descriptor");
    const bool whole = packet.header().count == FLOWGPU_MAPBACK_BYTES_THERE;
    handover = packet.take_fd(0);
    CurrentContext context;
    ManyDescriptors many;
    Memory& memory = task().memory;
    bool ending = false; // the program is in exit(): its driver has shut down behind the gate
    for (;;) {
        Received got = receive_packet(handover, &packet, kGhostAnswerMs);
        if (got != Received::ok)
            return fail(reply, FLOWGPU_SYSTEM,
                        "the ghost stopped in the middle of giving memory back");
        const flowgpu_header& header = packet.header();
        if (header.type == FLOWGPU_END)
            break;
        bool fits = header.type == FLOWGPU_BLOCKS && header.count == packet.fd_count &&
                    packet.size == sizeof header + header.count * sizeof(flowgpu_block);
        if (!fits) {
            packet.close_fds();
            return fail(reply, FLOWGPU_PROTOCOL, "not a list of blocks");
        }
        auto* rows = reinterpret_cast<const flowgpu_block*>(packet.bytes + sizeof header);
        for (uint32_t i = 0; i < header.count; i++) {
            if (ending)
                continue;
            CUresult result =
                memory.map_back(rows[i].id, rows[i].address, rows[i].bytes, packet.take_fd(i));
            ending = result == CUDA_ERROR_DEINITIALIZED;
            if (result == CUDA_SUCCESS || ending)
                continue;
            packet.close_fds();
            char what[96];
            snprintf(what, sizeof what, "mapping %llu bytes at %#llx",
                     static_cast<unsigned long long>(rows[i].bytes),
                     static_cast<unsigned long long>(rows[i].address));
            return fail_driver(reply, what, result);
        }
        packet.close_fds();
    }
    if (ending)
        memory.forget_all();
    if (!memory.all_present())
        return fail(reply, FLOWGPU_LOST, "the ghost did not give every block back");
    memory.refill_rooms(); // before any program runs on and takes what is free
    close_handover();
    add_totals(reply);
    if (whole) // it reads the memory
        finish_rebuild(reply);
}

// Through the program's own contexts: one more would take what is asked about. Behind a closed gate
// all of them are asked, those without memory too: the driver's checkpoint is next.
void on_room(Packet&, flowgpu_reply& reply) {
    reply.block_bytes = gate::is_closed() ? contexts::least_free_of_all() : contexts::least_free();
}

void on_written(Packet& packet, flowgpu_reply& reply) {
    if (packet.fd_count != 1 || gate::mode() != FLOWGPU_GATE_WATCH)
        return fail(reply, FLOWGPU_PROTOCOL, "WRITTEN carries one descriptor, and follows WATCH");
    std::vector<flowgpu_write> writes;
    const flowgpu_watched end = watch::noted(&writes);
    if (!send_rows<FLOWGPU_WRITES_PER_MESSAGE>(packet.fds[0], FLOWGPU_WRITES, writes) ||
        !send_packet(packet.fds[0], &end, sizeof end))
        fail(reply, FLOWGPU_SYSTEM, "nobody takes what calls have written");
}

void on_drop(Packet&, flowgpu_reply&) {
    close_handover();
    device_writes::end();
}

} // namespace flowgpu::service
