#include "bootstrap.h"

#include <cstring>
#include <random>
#include <thread>

#include <sys/prctl.h>
#include <unistd.h>

namespace flowgpu::nccl {

namespace {

constexpr int kRingTag = -1;

struct Joining {
    uint64_t magic;
    int32_t rank, ranks;
    Info info;
};

void serve(int listener, uint64_t magic) {
    prctl(PR_SET_NAME, "NCCL BootstrapR");
    const Stop never{false};
    std::vector<int> connections;
    std::vector<Info> table;
    size_t come = 0;
    while (connections.empty() || come < connections.size()) {
        int connection = -1;
        Joining joining{};
        if (accept_tcp(listener, &connection, never) != kSuccess)
            break;
        if (receive_all(connection, &joining, sizeof joining, never) != kSuccess ||
            joining.magic != magic || joining.ranks < 1 || joining.rank < 0 ||
            joining.rank >= joining.ranks) {
            ::close(connection); // no rank of ours
            continue;
        }
        connections.resize(static_cast<size_t>(joining.ranks), -1);
        table.resize(connections.size());
        const auto rank = static_cast<size_t>(joining.rank);
        if (connections[rank] >= 0)
            ::close(connections[rank]);
        else
            come++;
        connections[rank] = connection;
        table[rank] = joining.info;
    }
    for (const int connection : connections)
        send_all(connection, table.data(), table.size() * sizeof(Info), never);
    for (const int connection : connections)
        ::close(connection);
    ::close(listener);
}

} // namespace

Result make_root(UniqueId* id) {
    Root root{};
    int listener = -1;
    FN_TRY(listen_tcp(&listener, &root.address));
    std::random_device random;
    root.magic = static_cast<uint64_t>(random()) << 32 | random();
    *id = {};
    memcpy(id->bytes, &root, sizeof root);
    std::thread(serve, listener, root.magic).detach();
    return kSuccess;
}

Root root_of(const UniqueId& id) {
    Root root;
    memcpy(&root, id.bytes, sizeof root);
    return root;
}

Result Bootstrap::open(Info* own) {
    return listen_tcp(&listener_, &own->address);
}

Result Bootstrap::meet(const Root& root, int rank, int ranks, const Info& own, const Stop& stop) {
    int connection = -1;
    const Joining joining{root.magic, rank, ranks, own};
    std::vector<Info> table(static_cast<size_t>(ranks));
    FN_TRY(connect_tcp(root.address, &connection, stop));
    Result result = send_all(connection, &joining, sizeof joining, stop);
    if (result == kSuccess)
        result = receive_all(connection, table.data(), table.size() * sizeof(Info), stop);
    ::close(connection);
    return result == kSuccess ? meet(root.magic, rank, std::move(table), stop) : result;
}

Result Bootstrap::meet(uint64_t magic, int rank, std::vector<Info> table, const Stop& stop) {
    magic_ = magic;
    rank_ = rank;
    table_ = std::move(table);
    return table_.size() > 1 ? ring(stop) : kSuccess;
}

Result Bootstrap::ring(const Stop& stop) {
    const int ranks = static_cast<int>(table_.size());
    FN_TRY(call((rank_ + 1) % ranks, kRingTag, &next_, stop));
    return called((rank_ + ranks - 1) % ranks, kRingTag, &previous_, stop);
}

void Bootstrap::close() {
    for (int* one : {&listener_, &next_, &previous_}) {
        if (*one >= 0)
            ::close(*one);
        *one = -1;
    }
    for (const Early& one : early_)
        ::close(one.connection);
    early_.clear();
}

Result Bootstrap::all_gather(void* data, size_t bytes, const Stop& stop) {
    const int ranks = static_cast<int>(table_.size());
    auto* parts = static_cast<char*>(data);
    for (int step = 0; step + 1 < ranks; step++) {
        const auto mine = static_cast<size_t>((rank_ + ranks - step) % ranks);
        const auto theirs = static_cast<size_t>((rank_ + 2 * ranks - step - 1) % ranks);
        FN_TRY(send_all(next_, parts + mine * bytes, bytes, stop));
        FN_TRY(receive_all(previous_, parts + theirs * bytes, bytes, stop));
    }
    return kSuccess;
}

Result Bootstrap::barrier(const Stop& stop) {
    std::vector<char> parts(table_.size());
    return all_gather(parts.data(), 1, stop);
}

Result Bootstrap::call(int peer, int tag, int* connection, const Stop& stop) {
    FN_TRY(connect_tcp(table_[static_cast<size_t>(peer)].address, connection, stop));
    const Hello hello{magic_, rank_, tag};
    return send_all(*connection, &hello, sizeof hello, stop);
}

// Others may call first: they are kept.
Result Bootstrap::called(int peer, int tag, int* connection, const Stop& stop) {
    for (size_t i = 0; i < early_.size(); i++) {
        if (early_[i].hello.rank == peer && early_[i].hello.tag == tag) {
            *connection = early_[i].connection;
            early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(i));
            return kSuccess;
        }
    }
    for (;;) {
        Early one{};
        FN_TRY(accept_tcp(listener_, &one.connection, stop));
        if (receive_all(one.connection, &one.hello, sizeof one.hello, stop) != kSuccess ||
            one.hello.magic != magic_) {
            ::close(one.connection);
            if (stop)
                return kInternalError;
        } else if (one.hello.rank == peer && one.hello.tag == tag) {
            *connection = one.connection;
            return kSuccess;
        } else {
            early_.push_back(one);
        }
    }
}

Result Bootstrap::send(int peer, int tag, const void* data, size_t bytes, const Stop& stop) {
    int connection = -1;
    Result result = call(peer, tag, &connection, stop);
    if (result == kSuccess)
        result = send_all(connection, data, bytes, stop);
    if (connection >= 0)
        ::close(connection);
    return result;
}

Result Bootstrap::receive(int peer, int tag, void* data, size_t bytes, const Stop& stop) {
    int connection = -1;
    FN_TRY(called(peer, tag, &connection, stop));
    const Result result = receive_all(connection, data, bytes, stop);
    ::close(connection);
    return result;
}

} // namespace flowgpu::nccl
