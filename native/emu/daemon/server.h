// Connections of clients, each with a thread of its own.
#pragma once

#include "state.h"

namespace flowgpu::emu {

class Server {
  public:
    explicit Server(Machine* machine) : machine_(machine) {
        machine->settle = [this] { wait_for_the_dead(); };
    }
    // Takes over an accepted connection.
    void serve(UniqueFd socket);
    // Open connections of any client.
    int connections() const { return connections_.load(); }

  private:
    void talk(int socket);
    void wait_for_the_dead();
    std::shared_ptr<Client> greet(int socket, bool* first);
    bool answer(int socket, const std::shared_ptr<Client>& client);
    bool listen_for_callbacks(int socket, const std::shared_ptr<Client>& client);

    Machine* machine_;
    std::atomic<int> connections_{0};
    std::mutex mutex_;
    std::map<uint64_t, std::weak_ptr<Client>> clients_;
};

} // namespace flowgpu::emu
