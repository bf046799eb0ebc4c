// Sits between a process and its disk (LD_PRELOAD): records what reaches the disk, kills the process at a drawn system
// call, and makes calls fail or wait. Only calls on paths below an armed folder count.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_FILES 4096
#define EXPORTED __attribute__((visibility("default")))

enum { KILL_NEVER, KILL_BEFORE, KILL_WITHIN, KILL_AFTER };

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char folder[PATH_MAX];
static char *open_paths[MOST_FILES];
static FILE *trace;
static long calls, kill_at = -1, passing = -1;
static int kill_phase, fail_errno;
static char fail_kinds[256];
static unsigned write_delay_us;

// Arms the shim for a folder, or disarms it with "". `trace_path`: where calls are recorded, "" for nowhere.
EXPORTED void shim_arm(const char *path, const char *trace_path) {
  pthread_mutex_lock(&mutex);
  snprintf(folder, sizeof folder, "%s", path);
  if (trace) fclose(trace);
  trace = *trace_path ? fopen(trace_path, "wb") : NULL;
  calls = 0;
  kill_at = passing = -1;
  write_delay_us = 0;
  pthread_mutex_unlock(&mutex);
}

// Kills the process at call number `at`, counted from now.
EXPORTED void shim_kill(long at, int phase) {
  pthread_mutex_lock(&mutex);
  kill_at = calls + at;
  kill_phase = phase;
  pthread_mutex_unlock(&mutex);
}

// Makes calls of the kinds, separated by spaces, fail after `count` of them have passed; a negative count ends that.
EXPORTED void shim_fail(const char *kinds, long count, int code) {
  pthread_mutex_lock(&mutex);
  snprintf(fail_kinds, sizeof fail_kinds, " %s ", kinds);
  passing = count;
  fail_errno = code;
  pthread_mutex_unlock(&mutex);
}

EXPORTED void shim_delay_writes(unsigned microseconds) { write_delay_us = microseconds; }

EXPORTED long shim_calls(void) { return calls; }

// Records that the program was told something, such as that a step is saved.
EXPORTED void shim_mark(long value) {
  pthread_mutex_lock(&mutex);
  if (trace) {
    fprintf(trace, "mark %ld\n", value);
    fflush(trace);
  }
  pthread_mutex_unlock(&mutex);
}

#define REAL(name)                                        \
  static __typeof__(&name) real;                               \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int is_below(const char *path) {
  const size_t length = strlen(folder);
  return length && strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static const char *path_of(int fd) { return fd >= 0 && fd < MOST_FILES ? open_paths[fd] : NULL; }

// Counts a call. Returns -1 with errno where it must fail.
static int enter(const char *kind) {
  char word[64];
  snprintf(word, sizeof word, " %s ", kind);
  const long number = calls++;
  if (number == kill_at && kill_phase == KILL_BEFORE) kill(getpid(), SIGKILL);
  if (passing >= 0 && strstr(fail_kinds, word) && passing-- == 0) {
    passing = 0;
    errno = fail_errno;
    return -1;
  }
  return 0;
}

static int is_within(void) { return calls - 1 == kill_at && kill_phase == KILL_WITHIN; }

static void leave(void) {
  if (trace) fflush(trace);
  if (calls - 1 == kill_at && kill_phase != KILL_NEVER) kill(getpid(), SIGKILL);
}

static void note(const char *format, ...) {
  if (!trace) return;
  va_list values;
  va_start(values, format);
  vfprintf(trace, format, values);
  va_end(values);
}

static void remember(int fd, const char *path) {
  if (fd < 0 || fd >= MOST_FILES) return;
  free(open_paths[fd]);
  open_paths[fd] = path ? strdup(path) : NULL;
}

static int do_open(const char *path, int flags, mode_t mode) {
  static int (*real)(int, const char *, int, ...);
  if (!real) real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat");
  if (!is_below(path)) return real(AT_FDCWD, path, flags, mode);
  pthread_mutex_lock(&mutex);
  const int writes = (flags & O_ACCMODE) != O_RDONLY;
  int fd = -1;
  struct stat facts;
  const int existed = stat(path, &facts) == 0;
  if (!writes || enter("open") == 0) {
    fd = real(AT_FDCWD, path, flags, mode);
    if (fd >= 0) {
      remember(fd, path);
      if (writes && !existed) note("create %s\n", path);
      if (writes && existed && (flags & O_TRUNC)) note("truncate 0 %s\n", path);
    }
    const int code = errno;
    if (writes) leave();
    errno = code;
  }
  pthread_mutex_unlock(&mutex);
  return fd;
}

#define OPEN(name)                                \
  EXPORTED int name(const char *path, int flags, ...) { \
    va_list values;                               \
    va_start(values, flags);                      \
    const mode_t mode = va_arg(values, mode_t);   \
    va_end(values);                               \
    return do_open(path, flags, mode);            \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                        \
  EXPORTED int name(int at, const char *path, int flags, ...) { \
    REAL(name);                                             \
    va_list values;                                         \
    va_start(values, flags);                                \
    const mode_t mode = va_arg(values, mode_t);             \
    va_end(values);                                         \
    if (at == AT_FDCWD) return do_open(path, flags, mode);  \
    return real(at, path, flags, mode);                     \
  }
OPENAT(openat)
OPENAT(openat64)

EXPORTED int close(int fd) {
  REAL(close);
  if (path_of(fd)) {
    pthread_mutex_lock(&mutex);
    remember(fd, NULL);
    pthread_mutex_unlock(&mutex);
  }
  return real(fd);
}

static ssize_t do_write(int fd, const void *bytes, size_t size, off_t offset, const char *path) {
  static ssize_t (*real)(int, const void *, size_t, off_t);
  if (!real) real = (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite64");
  if (write_delay_us) usleep(write_delay_us);
  pthread_mutex_lock(&mutex);
  ssize_t done = -1;
  if (enter("write") == 0) {
    if (is_within()) size = size / 2 / 4096 * 4096;  // O_DIRECT takes whole blocks
    done = real(fd, bytes, size, offset);
    const int code = errno;
    if (done > 0 && trace) {
      note("write %ld %ld %s\n", (long)offset, (long)done, path);
      fwrite(bytes, 1, done, trace);
    }
    leave();
    errno = code;
  }
  pthread_mutex_unlock(&mutex);
  return done;
}

EXPORTED ssize_t write(int fd, const void *bytes, size_t size) {
  REAL(write);
  const char *path = path_of(fd);
  if (!path) return real(fd, bytes, size);
  const off_t offset = lseek(fd, 0, SEEK_CUR);
  const ssize_t done = do_write(fd, bytes, size, offset, path);
  if (done > 0) lseek(fd, offset + done, SEEK_SET);
  return done;
}

#define PWRITE(name)                                                       \
  EXPORTED ssize_t name(int fd, const void *bytes, size_t size, off_t offset) { \
    REAL(name);                                                            \
    const char *path = path_of(fd);                                        \
    return path ? do_write(fd, bytes, size, offset, path) : real(fd, bytes, size, offset); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

// Defines a call on a descriptor or a path: counts it, makes it, and records it if it succeeded.
#define CALL(kind, call, ...)    \
  pthread_mutex_lock(&mutex);             \
  int result = -1;                        \
  if (enter(kind) == 0) {                 \
    if (is_within()) kill(getpid(), SIGKILL); \
    result = call;                        \
    const int code = errno;               \
    if (result == 0) note(__VA_ARGS__);   \
    leave();                              \
    errno = code;                         \
  }                                       \
  pthread_mutex_unlock(&mutex);           \
  return result;

#define TRUNCATE(name)                            \
  EXPORTED int name(int fd, off_t size) {         \
    REAL(name);                                   \
    const char *path = path_of(fd);               \
    if (!path) return real(fd, size);             \
    CALL("truncate", real(fd, size), "truncate %ld %s\n", (long)size, path) \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define FALLOCATE(name)                                               \
  EXPORTED int name(int fd, int mode, off_t offset, off_t size) {     \
    REAL(name);                                                       \
    const char *path = path_of(fd);                                   \
    if (!path) return real(fd, mode, offset, size);                   \
    CALL("fallocate", real(fd, mode, offset, size), "truncate %ld %s\n", (long)(offset + size), path) \
  }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)

#define SYNC(name)                              \
  EXPORTED int name(int fd) {                   \
    REAL(name);                                 \
    const char *path = path_of(fd);             \
    if (!path) return real(fd);                 \
    CALL("fsync", real(fd), "fsync %s\n", path) \
  }
SYNC(fsync)
SYNC(fdatasync)

EXPORTED int rename(const char *from, const char *to) {
  REAL(rename);
  if (!is_below(from)) return real(from, to);
  CALL("rename", real(from, to), "rename %s\n%s\n", from, to)
}

EXPORTED int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
  REAL(renameat2);
  if (!is_below(from)) return real(from_at, from, to_at, to, flags);
  CALL("rename", real(from_at, from, to_at, to, flags), flags & RENAME_EXCHANGE ? "exchange %s\n%s\n" : "rename %s\n%s\n",
       from, to)
}

EXPORTED int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  if (!is_below(path)) return real(path, mode);
  CALL("mkdir", real(path, mode), "mkdir %s\n", path)
}

EXPORTED int unlink(const char *path) {
  REAL(unlink);
  if (!is_below(path)) return real(path);
  CALL("unlink", real(path), "unlink %s\n", path)
}

EXPORTED int rmdir(const char *path) {
  REAL(rmdir);
  if (!is_below(path)) return real(path);
  CALL("rmdir", real(path), "rmdir %s\n", path)
}
