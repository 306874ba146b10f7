#include "addresses.h"

#include <cstring>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "next.h"

namespace flowgpu::exec {

namespace {

constexpr size_t kRows = 1024;
constexpr size_t kTextBytes = kRows * 2 * INET6_ADDRSTRLEN;
constexpr unsigned char kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

AddressRow rows[kRows];
char text[kTextBytes];
AddressTable table = {"flowgpu-hosts-1", kRows, rows, kTextBytes, text, 0};

uint64_t count() {
    return __atomic_load_n(&table.count, __ATOMIC_RELAXED);
}

bool is_used() {
    return __builtin_expect(count() != 0, 0);
}

struct Functions {
    int (*connect)(int, const sockaddr*, socklen_t);
    int (*bind)(int, const sockaddr*, socklen_t);
    ssize_t (*sendto)(int, const void*, size_t, int, const sockaddr*, socklen_t);
    ssize_t (*sendmsg)(int, const msghdr*, int);
    int (*sendmmsg)(int, mmsghdr*, unsigned, int);
    int (*accept)(int, sockaddr*, socklen_t*);
    int (*accept4)(int, sockaddr*, socklen_t*, int);
    int (*getsockname)(int, sockaddr*, socklen_t*);
    int (*getpeername)(int, sockaddr*, socklen_t*);
    ssize_t (*recvfrom)(int, void*, size_t, int, sockaddr*, socklen_t*);
    ssize_t (*recvfrom_chk)(int, void*, size_t, size_t, int, sockaddr*, socklen_t*);
    ssize_t (*recvmsg)(int, msghdr*, int);
    int (*recvmmsg)(int, mmsghdr*, unsigned, int, timespec*);
};

void find(Functions& found) {
    look_up(found.connect, "connect");
    look_up(found.bind, "bind");
    look_up(found.sendto, "sendto");
    look_up(found.sendmsg, "sendmsg");
    look_up(found.sendmmsg, "sendmmsg");
    look_up(found.accept, "accept");
    look_up(found.accept4, "accept4");
    look_up(found.getsockname, "getsockname");
    look_up(found.getpeername, "getpeername");
    look_up(found.recvfrom, "recvfrom");
    look_up(found.recvfrom_chk, "__recvfrom_chk");
    look_up(found.recvmsg, "recvmsg");
    look_up(found.recvmmsg, "recvmmsg");
}

Next<Functions, find> next;

__attribute__((constructor)) void begin() {
    next.begin();
}

// Where a socket's address has its host, and how many bytes that is; 0: it has none.
size_t host_of(const sockaddr* address, size_t size, size_t* at) {
    if (size >= offsetof(sockaddr_in, sin_zero) && address->sa_family == AF_INET) {
        *at = offsetof(sockaddr_in, sin_addr);
        return sizeof(in_addr);
    }
    if (size >= offsetof(sockaddr_in6, sin6_scope_id) && address->sa_family == AF_INET6) {
        *at = offsetof(sockaddr_in6, sin6_addr);
        return sizeof(in6_addr);
    }
    return 0;
}

using Column = unsigned char (AddressRow::*)[16];

// Replaces the host by what the first row has that knows it. False: none does.
bool translate(sockaddr* address, size_t size, Column from, Column to) {
    size_t at = 0;
    const size_t length = address ? host_of(address, size, &at) : 0;
    if (!length)
        return false;
    unsigned char* host = reinterpret_cast<unsigned char*>(address) + at;
    unsigned char whole[16];
    memcpy(whole, kMapped, sizeof kMapped);
    memcpy(whole + sizeof whole - length, host, length);
    for (uint64_t n = 0; n < count(); n++) {
        if (memcmp(rows[n].*from, whole, sizeof whole) == 0) {
            memcpy(host, rows[n].*to + sizeof whole - length, length);
            return true;
        }
    }
    return false;
}

// The address that a program gives, as it is now.
class Now {
  public:
    Now(const void* address, socklen_t size) : address_(static_cast<const sockaddr*>(address)) {
        if (!address || size > sizeof copy_)
            return;
        memcpy(&copy_, address, size);
        auto* copy = reinterpret_cast<sockaddr*>(&copy_);
        if (translate(copy, size, &AddressRow::known, &AddressRow::now))
            address_ = copy;
    }
    Now(const Now&) = delete;

    const sockaddr* get() const { return address_; }

  private:
    const sockaddr* address_;
    sockaddr_storage copy_;
};

// What the kernel has written into `room` bytes becomes what the program knows.
void tell(void* address, socklen_t room, socklen_t size) {
    translate(static_cast<sockaddr*>(address), room < size ? room : size, &AddressRow::now,
              &AddressRow::known);
}

// Asked again behind the call: a call that waits may be one that a checkpoint has stopped.
template <typename Result, typename Call>
Result told(sockaddr* address, socklen_t* size, Call call) {
    const socklen_t room = address && size ? *size : 0;
    const Result result = call();
    if (is_used() && result >= 0 && room)
        tell(address, room, *size);
    return result;
}

} // namespace

void take_addresses(const char* value) {
    const size_t bytes = strlen(kAddresses) + 1 + strlen(value) + 1;
    if (bytes > kTextBytes)
        return;
    char* end = stpcpy(stpcpy(text, kAddresses), "=");
    memcpy(end, value, strlen(value) + 1);
    char word[INET6_ADDRSTRLEN];
    uint64_t taken = 0;
    unsigned char* places[] = {nullptr, nullptr};
    while (*value && taken < kRows) {
        places[0] = rows[taken].known;
        places[1] = rows[taken].now;
        bool fits = true;
        for (size_t n = 0; n < 2; n++) {
            const size_t length = strcspn(value, n ? "," : "=,");
            fits = fits && length < sizeof word;
            if (fits) {
                memcpy(word, value, length);
                word[length] = '\0';
                memcpy(places[n], kMapped, sizeof kMapped);
                fits = inet_pton(AF_INET, word, places[n] + sizeof kMapped) == 1 ||
                       inet_pton(AF_INET6, word, places[n]) == 1;
            }
            value += length;
            value += *value ? 1 : 0;
        }
        taken += fits ? 1 : 0;
    }
    table.count = taken;
}

const char* addresses_variable() {
    return count() ? table.text : nullptr;
}

} // namespace flowgpu::exec

using namespace flowgpu::exec;

FGE_EXPORT int connect(int fd, const sockaddr* address, socklen_t size) {
    if (!is_used())
        return next().connect(fd, address, size);
    return next().connect(fd, Now(address, size).get(), size);
}

FGE_EXPORT int bind(int fd, const sockaddr* address, socklen_t size) noexcept {
    if (!is_used())
        return next().bind(fd, address, size);
    return next().bind(fd, Now(address, size).get(), size);
}

FGE_EXPORT ssize_t sendto(int fd, const void* data, size_t bytes, int flags,
                          const sockaddr* address, socklen_t size) {
    if (!is_used())
        return next().sendto(fd, data, bytes, flags, address, size);
    return next().sendto(fd, data, bytes, flags, Now(address, size).get(), size);
}

FGE_EXPORT ssize_t sendmsg(int fd, const msghdr* message, int flags) {
    if (!is_used() || !message || !message->msg_name)
        return next().sendmsg(fd, message, flags);
    const Now now(message->msg_name, message->msg_namelen);
    msghdr copy = *message;
    copy.msg_name = const_cast<sockaddr*>(now.get());
    return next().sendmsg(fd, &copy, flags);
}

FGE_EXPORT int sendmmsg(int fd, mmsghdr* messages, unsigned length, int flags) {
    if (!is_used() || !messages)
        return next().sendmmsg(fd, messages, length, flags);
    int sent = 0;
    for (; sent < static_cast<int>(length); sent++) {
        const ssize_t bytes = sendmsg(fd, &messages[sent].msg_hdr, flags);
        if (bytes < 0)
            return sent ? sent : -1;
        messages[sent].msg_len = static_cast<unsigned>(bytes);
    }
    return sent;
}

FGE_EXPORT int accept(int fd, sockaddr* address, socklen_t* size) {
    return told<int>(address, size, [&] { return next().accept(fd, address, size); });
}

FGE_EXPORT int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
    return told<int>(address, size, [&] { return next().accept4(fd, address, size, flags); });
}

FGE_EXPORT int getsockname(int fd, sockaddr* address, socklen_t* size) noexcept {
    return told<int>(address, size, [&] { return next().getsockname(fd, address, size); });
}

FGE_EXPORT int getpeername(int fd, sockaddr* address, socklen_t* size) noexcept {
    return told<int>(address, size, [&] { return next().getpeername(fd, address, size); });
}

FGE_EXPORT ssize_t recvfrom(int fd, void* data, size_t bytes, int flags, sockaddr* address,
                            socklen_t* size) {
    return told<ssize_t>(address, size,
                         [&] { return next().recvfrom(fd, data, bytes, flags, address, size); });
}

// What programs call that were compiled with checks of the C library's.
FGE_EXPORT ssize_t __recvfrom_chk(int fd, void* data, size_t bytes, size_t room, int flags,
                                  sockaddr* address, socklen_t* size) {
    return told<ssize_t>(address, size, [&] {
        return next().recvfrom_chk(fd, data, bytes, room, flags, address, size);
    });
}

FGE_EXPORT ssize_t recvmsg(int fd, msghdr* message, int flags) {
    const socklen_t room = message && message->msg_name ? message->msg_namelen : 0;
    const ssize_t result = next().recvmsg(fd, message, flags);
    if (is_used() && result >= 0 && room)
        tell(message->msg_name, room, message->msg_namelen);
    return result;
}

FGE_EXPORT int recvmmsg(int fd, mmsghdr* messages, unsigned length, int flags, timespec* timeout) {
    constexpr unsigned kMost = 1024; // UIO_MAXIOV of the kernel
    if (!is_used() || !messages)
        return next().recvmmsg(fd, messages, length, flags, timeout);
    socklen_t room[kMost];
    length = length < kMost ? length : kMost;
    for (unsigned n = 0; n < length; n++)
        room[n] = messages[n].msg_hdr.msg_name ? messages[n].msg_hdr.msg_namelen : 0;
    const int result = next().recvmmsg(fd, messages, length, flags, timeout);
    for (int n = 0; n < result; n++)
        if (room[n])
            tell(messages[n].msg_hdr.msg_name, room[n], messages[n].msg_hdr.msg_namelen);
    return result;
}
