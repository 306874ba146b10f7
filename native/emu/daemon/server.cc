#include "server.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

using Handler = int32_t (*)(Session&);

// Ops that a connection answers by itself, outside the table.
int32_t not_here(Session&) {
    return CUDA_ERROR_INVALID_VALUE;
}

} // namespace

int32_t op_Hello(Session& s) {
    return not_here(s);
}
int32_t op_CallbackListen(Session& s) {
    return not_here(s);
}

namespace {

const Handler kHandlers[] = {
#define FLOWGPU_EMU_OP(name) &op_##name,
    FLOWGPU_EMU_OPS(FLOWGPU_EMU_OP)
#undef FLOWGPU_EMU_OP
};

bool same_user(const ucred& peer) {
    return peer.uid == ::getuid() || ::getuid() == 0;
}

bool hung_up(int socket) {
    pollfd one{socket, POLLRDHUP, 0};
    return ::poll(&one, 1, 0) > 0;
}

bool reply(int socket, int32_t result, const std::vector<uint8_t>& payload, int fd) {
    const ReplyHeader header{static_cast<uint32_t>(payload.size()), result};
    return send_message(socket, &header, sizeof header, payload, fd);
}

} // namespace

void Server::serve(UniqueFd socket) {
    ++connections_;
    std::thread([this, fd = socket.release()] {
        const UniqueFd owned(fd);
        talk(fd);
        --connections_;
    }).detach();
}

// The first connection of a process makes it a client, and ends it when it closes. The others name
// the client that they belong to.
std::shared_ptr<Client> Server::greet(int socket, bool* first) {
    RequestHeader request{};
    std::vector<uint8_t> payload;
    ucred peer{};
    socklen_t size = sizeof peer;
    if (!receive_message(socket, &request, sizeof request, payload, nullptr) ||
        request.op != Op::Hello ||
        ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || !same_user(peer)) {
        return nullptr;
    }
    Reader in(payload.data(), payload.size());
    const auto magic = in.take<uint32_t>();
    const auto version = in.take<uint32_t>();
    auto id = in.take<uint64_t>();
    const bool chosen = in.take<uint8_t>() != 0;
    const std::string wanted = in.take_string();
    std::shared_ptr<Client> client;
    *first = id == 0;
    if (magic == kWireMagic && version == kWireVersion) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (*first) {
            while (id == 0 || clients_.count(id) != 0) {
                if (::getrandom(&id, sizeof id, 0) != sizeof id) {
                    return nullptr;
                }
            }
            client = std::make_shared<Client>(machine_, id, peer.pid,
                                              machine_->visible(chosen ? wanted.c_str() : nullptr));
            client->control = socket;
            clients_[id] = client;
        } else if (const auto known = clients_.find(id); known != clients_.end()) {
            client = known->second.lock();
            client = client != nullptr && client->pid == peer.pid ? client : nullptr;
        }
    }
    Writer out;
    out.put(id);
    if (!reply(socket, client != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE, out.buffer(),
               -1)) {
        return nullptr;
    }
    return client;
}

void Server::talk(int socket) {
    bool first = false;
    const auto client = greet(socket, &first);
    if (client == nullptr) {
        return;
    }
    machine_->log("client " + std::to_string(client->pid) + (first ? " arrives" : " connects"));
    while (answer(socket, client)) {
    }
    if (first) {
        client->destroy();
        const long left = client->left_behind();
        std::lock_guard<std::mutex> lock(mutex_);
        clients_.erase(client->id);
        machine_->log("client " + std::to_string(client->pid) + " is gone, " +
                      (left == 0 ? "nothing" : std::to_string(left)) + " left");
    }
}

void Server::wait_for_the_dead() {
    const auto deadline = Clock::now() + std::chrono::seconds(2);
    const auto dying = [this] {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::any_of(clients_.begin(), clients_.end(), [](const auto& entry) {
            const auto client = entry.second.lock();
            return client != nullptr &&
                   (hung_up(client->control) || (::kill(client->pid, 0) != 0 && errno == ESRCH));
        });
    };
    while (dying() && Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

bool Server::answer(int socket, const std::shared_ptr<Client>& client) {
    RequestHeader request{};
    std::vector<uint8_t> payload;
    UniqueFd fd_in;
    if (!receive_message(socket, &request, sizeof request, payload, &fd_in) ||
        request.op >= Op::Count) {
        return false;
    }
    if (request.op == Op::CallbackListen) {
        return listen_for_callbacks(socket, client);
    }
    Session session{
        *client, request,    Reader(payload.data(), payload.size()),     Writer(), std::move(fd_in),
        -1,      UniqueFd(), std::unique_lock<std::mutex>(client->mutex)};
    int32_t result = CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (!client->gone) {
        result = kHandlers[static_cast<size_t>(request.op)](session);
    }
    if (!session.in.good()) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    session.lock.unlock();
    return reply(socket, result, session.out.buffer(), session.fd_out);
}

// From here on the streams ask and the client answers; this thread only keeps the connection.
bool Server::listen_for_callbacks(int socket, const std::shared_ptr<Client>& client) {
    {
        std::lock_guard<std::mutex> lock(client->mutex);
        if (client->callback_socket >= 0 || client->gone) {
            return false;
        }
        client->callback_socket = socket;
    }
    if (!reply(socket, CUDA_SUCCESS, {}, -1)) {
        return false;
    }
    std::unique_lock<std::mutex> lock(client->mutex);
    client->callbacks_end.wait(lock, [&] { return client->gone; });
    // A stream may be waiting for an answer on this socket: it must not close under it.
    lock.unlock();
    std::lock_guard<std::mutex> idle(client->callback_mutex);
    client->callback_socket = -1;
    return false;
}

} // namespace flowgpu::emu
