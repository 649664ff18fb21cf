/* Makes the disk slow for a process while it runs. LD_PRELOAD this library, and set SLOW_DISK_FOLDER to
   the folder whose files are slow and SLOW_DISK to a file of three 64-bit integers: the nanoseconds that
   each operation takes longer, the count of operations that the process's main thread waited for, and
   that of all operations. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *delay_ns;
static char folder[512];

__attribute__((constructor)) static void map(void) {
    const char *name = getenv("SLOW_DISK"), *of = getenv("SLOW_DISK_FOLDER");
    int fd = name && of ? (int)syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, 3 * sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    snprintf(folder, sizeof folder, "%s/", of);
    if (at != MAP_FAILED)
        delay_ns = at;
}

static void wait_for_disk(const char *path) {
    if (strncmp(path, folder, strlen(folder)) != 0)
        return;
    struct timespec rest = {delay_ns[0] / 1000000000, delay_ns[0] % 1000000000};
    if (getpid() == (pid_t)syscall(SYS_gettid))
        __atomic_add_fetch(&delay_ns[1], 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&delay_ns[2], 1, __ATOMIC_RELAXED);
    nanosleep(&rest, NULL);
}

static int is_slow(void) { return delay_ns && delay_ns[0] > 0; }

static void wait_for_file(int fd) {
    char name[64], path[512];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        wait_for_disk(path);
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    if (is_slow())
        wait_for_file(fd);
    return REAL(write)(fd, data, size);
}

#define PWRITE(name)                                                                               \
    ssize_t name(int fd, const void *data, size_t size, off_t at) {                                \
        if (is_slow())                                                                             \
            wait_for_file(fd);                                                                     \
        return REAL(name)(fd, data, size, at);                                                     \
    }

PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (is_slow())
        wait_for_file(fd);
    return syscall(SYS_writev, fd, parts, count);
}

ssize_t read(int fd, void *data, size_t size) {
    if (is_slow())
        wait_for_file(fd);
    return REAL(read)(fd, data, size);
}

int fsync(int fd) {
    if (is_slow())
        wait_for_file(fd);
    return REAL(fsync)(fd);
}

int fdatasync(int fd) {
    if (is_slow())
        wait_for_file(fd);
    return REAL(fdatasync)(fd);
}

int rename(const char *from, const char *to) {
    if (is_slow())
        wait_for_disk(to);
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    if (is_slow())
        wait_for_disk(path);
    return REAL(unlink)(path);
}

static int open_slowly(int at, const char *path, int flags, mode_t mode) {
    if (is_slow())
        wait_for_disk(path);
    return (int)syscall(SYS_openat, at, path, flags, mode);
}

#define OPEN(declaration, at)                                                                       \
    declaration {                                                                                  \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                  \
        va_end(rest);                                                                              \
        return open_slowly(at, path, flags, mode);                                                 \
    }

OPEN(int open(const char *path, int flags, ...), AT_FDCWD)
OPEN(int open64(const char *path, int flags, ...), AT_FDCWD)
OPEN(int openat(int at, const char *path, int flags, ...), at)
OPEN(int openat64(int at, const char *path, int flags, ...), at)
