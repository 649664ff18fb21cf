/* The least that a relay of streams can do: for each client's connection one to the backend, and what
 * arrives on one is written to the other. One thread, one read and one write for what arrives.
 *
 *     copy_relay PORT BACKEND_PORT
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

enum { EVENTS = 1024, FDS = 1 << 17 };

static int peer[FDS];

static int open_socket(int port, int is_listener) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (is_listener ? bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 8192)
                    : connect(fd, (struct sockaddr *)&address, sizeof address))
        exit(1);
    return fd;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    struct rlimit limit = {FDS, FDS};
    setrlimit(RLIMIT_NOFILE, &limit);
    signal(SIGPIPE, SIG_IGN);
    int poll_fd = epoll_create1(0), listener = open_socket(atoi(argv[1]), 1), one = 1;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[EVENTS];
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int found = epoll_wait(poll_fd, events, EVENTS, -1);
        for (int n = 0; n < found; n++) {
            static char bytes[65536];
            int fd = events[n].data.fd;
            if (fd == listener) {
                int client = accept(listener, 0, 0), backend = open_socket(atoi(argv[2]), 0);
                setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                peer[client] = backend;
                peer[backend] = client;
                event.data.fd = client;
                epoll_ctl(poll_fd, EPOLL_CTL_ADD, client, &event);
                event.data.fd = backend;
                epoll_ctl(poll_fd, EPOLL_CTL_ADD, backend, &event);
                continue;
            }
            ssize_t size = read(fd, bytes, sizeof bytes);
            if (size > 0 && write(peer[fd], bytes, (size_t)size) == size) continue;
            if (peer[fd] >= 0) {
                peer[peer[fd]] = -1;
                close(peer[fd]);
            }
            close(fd);
        }
    }
}
