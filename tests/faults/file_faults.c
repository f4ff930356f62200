/* Preloaded into a process: counts file operations below a folder, and lets one of them fail.

   A driver sets the variables through ctypes, after a fork. Operations that change the folder are
   counted: opening to write, writing, renaming, removing, making a folder, fsync. The k-th one
   kills the process, before it or in the middle of a write, or fails with an error number from
   then on. Any file that is opened is compared with a folder that nobody may read, and any that is
   opened to write with the folders in which writing is allowed. */
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
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, KILL, KILL_IN_WRITE, FAIL };

char faults_root[PATH_MAX];      /* operations below it count */
char faults_forbidden[PATH_MAX]; /* no file below it may be opened */
char faults_allowed[4][PATH_MAX];/* writing is allowed below these */
char faults_log[PATH_MAX];       /* where operations are noted; empty: nowhere */
char faults_found[PATH_MAX];     /* the first path that was opened against the rules */
int faults_mode = OFF, faults_errno = 0;
long faults_at = 0, faults_count = 0;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below(const char *path, const char *root) {
  size_t n = strlen(root);
  return n && strncmp(path, root, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static int absolute(int dir, const char *path, char *out) {
  char base[PATH_MAX] = "", link[64];
  if (path[0] != '/') {
    if (dir == AT_FDCWD) {
      if (!getcwd(base, sizeof base)) return 0;
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
      ssize_t n = readlink(link, base, sizeof base - 1);
      if (n < 0) return 0;
      base[n] = 0;
    }
  }
  if (strlen(base) + strlen(path) + 2 > PATH_MAX) return 0;
  snprintf(out, PATH_MAX, "%s%s%s", base, base[0] ? "/" : "", path);
  return 1;
}

static void note(const char *operation, const char *path) {
  if (!faults_log[0]) return;
  char line[PATH_MAX + 64];
  int n = snprintf(line, sizeof line, "%ld %s %s\n", faults_count, operation, path);
  int fd = REAL(open)(faults_log, O_WRONLY | O_APPEND | O_CREAT, 0644);
  if (fd >= 0) { REAL(write)(fd, line, n); REAL(close)(fd); }
}

/* 0: go on; 1: fail with errno set; 2: die in the middle of the write. */
static int reached(const char *operation, const char *path, int is_write) {
  if (faults_mode == OFF || !below(path, faults_root)) return 0;
  long now = __atomic_add_fetch(&faults_count, 1, __ATOMIC_SEQ_CST);
  note(operation, path);
  if (faults_mode == KILL_IN_WRITE && now == faults_at && is_write) return 2;
  if ((faults_mode == KILL || faults_mode == KILL_IN_WRITE) && now == faults_at)
    kill(getpid(), SIGKILL), pause();
  if (faults_mode == FAIL && now >= faults_at &&
      (is_write || faults_errno == EROFS || strncmp(operation, "open", 4) == 0 ||
       strcmp(operation, "mkdir") == 0)) {
    errno = faults_errno;
    return 1;
  }
  return 0;
}

static int reached_at(const char *operation, int dir, const char *path) {
  char whole[PATH_MAX];
  if (faults_mode == OFF || !path || !absolute(dir, path, whole)) return 0;
  return reached(operation, whole, 0);
}

static int reached_fd(const char *operation, int fd, int is_write) {
  char link[64], path[PATH_MAX];
  if (faults_mode == OFF) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return reached(operation, path, is_write);
}

static void watch(int dir, const char *path, int writes) {
  char whole[PATH_MAX], parent[PATH_MAX], real[PATH_MAX];
  if (!faults_forbidden[0] || faults_found[0] || !absolute(dir, path, whole)) return;
  if (!realpath(whole, real)) {
    strcpy(parent, whole);
    char *slash = strrchr(parent, '/');
    if (!slash || slash == parent) return;
    *slash = 0;
    if (!realpath(parent, real)) return;
  }
  int wrong = below(real, faults_forbidden);
  if (writes && !wrong && !below(real, "/dev") && !below(real, "/proc")) {
    wrong = 1;
    for (int i = 0; i < 4; i++) wrong &= !below(real, faults_allowed[i]);
  }
  if (wrong) snprintf(faults_found, sizeof faults_found, "%s %s", writes ? "write" : "read", real);
}

static int opens(int dir, const char *path, int flags) {
  int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);
  watch(dir, path, writes);
  return writes ? reached_at(flags & O_CREAT ? "open-create" : "open-write", dir, path) : 0;
}

#define MODE(flags, last) \
  mode_t mode = 0; \
  if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list a; va_start(a, last); mode = va_arg(a, mode_t); va_end(a); }

int open(const char *path, int flags, ...) { MODE(flags, flags); return opens(AT_FDCWD, path, flags) ? -1 : REAL(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, flags); return opens(AT_FDCWD, path, flags) ? -1 : REAL(open64)(path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE(flags, flags); return opens(dir, path, flags) ? -1 : REAL(openat)(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE(flags, flags); return opens(dir, path, flags) ? -1 : REAL(openat64)(dir, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opens(AT_FDCWD, path, O_WRONLY | O_CREAT) ? -1 : REAL(creat)(path, mode); }

static int flags_of(const char *mode) { return mode[0] == 'r' && !strchr(mode, '+') ? O_RDONLY : O_WRONLY | O_CREAT; }
FILE *fopen(const char *path, const char *mode) { return opens(AT_FDCWD, path, flags_of(mode)) ? NULL : REAL(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { return opens(AT_FDCWD, path, flags_of(mode)) ? NULL : REAL(fopen64)(path, mode); }

int rename(const char *a, const char *b) { return reached_at("rename", AT_FDCWD, b) ? -1 : REAL(rename)(a, b); }
int renameat(int d, const char *a, int e, const char *b) { return reached_at("rename", e, b) ? -1 : REAL(renameat)(d, a, e, b); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { return reached_at("rename", e, b) ? -1 : REAL(renameat2)(d, a, e, b, f); }
int unlink(const char *p) { return reached_at("unlink", AT_FDCWD, p) ? -1 : REAL(unlink)(p); }
int unlinkat(int d, const char *p, int f) { return reached_at("unlink", d, p) ? -1 : REAL(unlinkat)(d, p, f); }
int rmdir(const char *p) { return reached_at("rmdir", AT_FDCWD, p) ? -1 : REAL(rmdir)(p); }
int mkdir(const char *p, mode_t m) { return reached_at("mkdir", AT_FDCWD, p) ? -1 : REAL(mkdir)(p, m); }
int mkdirat(int d, const char *p, mode_t m) { return reached_at("mkdir", d, p) ? -1 : REAL(mkdirat)(d, p, m); }
int link(const char *a, const char *b) { return reached_at("link", AT_FDCWD, b) ? -1 : REAL(link)(a, b); }
int symlink(const char *a, const char *b) { return reached_at("symlink", AT_FDCWD, b) ? -1 : REAL(symlink)(a, b); }
int fsync(int fd) { return reached_fd("fsync", fd, 0) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return reached_fd("fsync", fd, 0) ? -1 : REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t n) { return reached_fd("truncate", fd, 1) ? -1 : REAL(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { return reached_fd("truncate", fd, 1) ? -1 : REAL(ftruncate64)(fd, n); }

#define DIE kill(getpid(), SIGKILL), pause()
ssize_t write(int fd, const void *data, size_t n) {
  int found = reached_fd("write", fd, 1);
  if (found == 1) return -1;
  if (found == 2) REAL(write)(fd, data, n / 2), DIE;
  return REAL(write)(fd, data, n);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
  int found = reached_fd("write", fd, 1);
  if (found == 1) return -1;
  if (found == 2) REAL(pwrite)(fd, data, n / 2, at), DIE;
  return REAL(pwrite)(fd, data, n, at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
  int found = reached_fd("write", fd, 1);
  if (found == 1) return -1;
  if (found == 2) REAL(pwrite64)(fd, data, n / 2, at), DIE;
  return REAL(pwrite64)(fd, data, n, at);
}
ssize_t writev(int fd, const struct iovec *v, int n) {
  int found = reached_fd("write", fd, 1);
  if (found == 1) return -1;
  if (found == 2) REAL(writev)(fd, v, n / 2), DIE;
  return REAL(writev)(fd, v, n);
}
