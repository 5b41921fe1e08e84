// Collectives between the CPU devices of one process, as XLA custom calls: a device brings its message, sees those of
// the others as soon as they are there, and goes on. XLA's own have every device wait twice, asleep.
//
// A device has two places for messages, one for its even and one for its odd meetings. It writes a message into its
// place and then stores the meeting's number; who reads that number finds the message. A device that comes to meeting
// n + 2 has seen all others at n + 1, so all of them are done with the message of meeting n, whose place it takes.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "xla/ffi/api/c_api.h"

#ifndef PATIENCE_S
#define PATIENCE_S 120  // for devices that don't come; XLA's own collectives have less
#endif

#define SECOND_NS ((int64_t)1000000000)

enum {
  MOST_DEVICES = 64,
  MOST_SHARDS = 4096,
  MOST_NODES = 24,  // of a device: two of each level of the tree at most
  LINE_FLOATS = 16,  // slices begin at multiples of so many: no two devices write one line of a cache
  ROOMS = 32,
  BLOCK = 512,       // columns that are summed at a time: those of all rows stay in a core's cache
  SPIN_NS = 100000,  // looking at the others before sleeping, where every device has a core; less after it was in vain
  LEAST_SPIN_NS = 2000,
  LOOKS = 32,  // between two looks at the clock
};

typedef struct {
  _Alignas(128) atomic_uint_fast64_t arrived;  // the last meeting for which this device's message is there
  _Alignas(128) atomic_int occupied;           // a thread of this device is in a meeting
  uint64_t meetings;                           // that this device has come to; its own, as is what follows
  int64_t spin;                                // nanoseconds
  int64_t call[2];                             // which of the program's calls the message is for
  size_t bytes[2];                             // that all devices say alike of it
  size_t capacity[2];
  char *message[2];
} Seat;

// Where the devices of one execution of a program meet.
typedef struct {
  bool taken;
  int64_t run;
  uint64_t used;  // when, as a count
  atomic_int inside;
  atomic_int asleep;
  atomic_bool broken;  // one device has failed here: nobody waits any more
  pthread_mutex_t lock;
  pthread_cond_t news;
  Seat seats[MOST_DEVICES];
} Room;

static Room rooms[ROOMS];
static uint64_t uses;
static atomic_flag registry = ATOMIC_FLAG_INIT;  // held for a look at the rooms

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int cores(void) {
  static atomic_int found;
  int n = atomic_load_explicit(&found, memory_order_relaxed);
  if (n > 0) return n;
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) n = CPU_COUNT(&set);
#endif
  if (n <= 0) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
  if (n <= 0) n = 1;
  atomic_store_explicit(&found, n, memory_order_relaxed);
  return n;
}

// The room of an execution; a new one takes over that in which nobody is and which was used last, whose memory is warm.
// Should that be between two meetings of another execution, then all of its devices have been at equally many, and meet
// again in another room. NULL: somebody is in each.
static Room *enter(int64_t run) {
  for (int tries = 0; atomic_flag_test_and_set_explicit(&registry, memory_order_acquire); tries++) {
    if (tries < 1000) pause_briefly();
    else sched_yield();
  }
  Room *room = NULL, *free_one = NULL;
  for (int i = 0; i < ROOMS && room == NULL; i++) {
    if (rooms[i].taken && rooms[i].run == run) room = &rooms[i];
    else if (atomic_load(&rooms[i].inside) == 0 && (free_one == NULL || rooms[i].used > free_one->used))
      free_one = &rooms[i];
  }
  if (room == NULL && free_one != NULL) {
    room = free_one;
    if (!room->taken) {
      pthread_mutex_init(&room->lock, NULL);
      pthread_cond_init(&room->news, NULL);
    }
    room->taken = true;
    room->run = run;
    atomic_store(&room->broken, false);
    for (int i = 0; i < MOST_DEVICES; i++) {
      atomic_store(&room->seats[i].arrived, 0);
      atomic_store(&room->seats[i].occupied, 0);
      room->seats[i].meetings = 0;
      room->seats[i].spin = SPIN_NS;
    }
  }
  if (room != NULL) {
    room->used = ++uses;
    atomic_fetch_add(&room->inside, 1);
  }
  atomic_flag_clear_explicit(&registry, memory_order_release);
  return room;
}

static void wake_all(Room *room) {
  pthread_mutex_lock(&room->lock);
  pthread_cond_broadcast(&room->news);
  pthread_mutex_unlock(&room->lock);
}

// Nobody waits in this room any more.
static void give_up(Room *room) {
  atomic_store(&room->broken, true);
  wake_all(room);
}

// This device's place for the message of its next meeting, or NULL without memory; all devices say `alike` of it.
static char *prepare(Seat *seat, int64_t call, size_t bytes, size_t alike) {
  int place = (int)(++seat->meetings & 1);
  if (seat->capacity[place] < bytes || seat->message[place] == NULL) {
    free(seat->message[place]);
    seat->capacity[place] = 0;
    void *memory = NULL;
    if (posix_memalign(&memory, 128, bytes > 0 ? bytes : 1) == 0) seat->capacity[place] = bytes;
    seat->message[place] = memory;
    if (memory == NULL) return NULL;
  }
  seat->call[place] = call;
  seat->bytes[place] = alike;
  return seat->message[place];
}

static bool all_there(Room *room, int devices, uint64_t meeting) {
  for (int i = 0; i < devices; i++) {
    if (atomic_load(&room->seats[i].arrived) < meeting) return false;
  }
  return true;
}

typedef enum { TOGETHER, LATE, BROKEN } Outcome;

// Tell the others that the message is there, and wait for theirs.
static Outcome meet(Room *room, int devices, int device) {
  Seat *seat = &room->seats[device];
  uint64_t meeting = seat->meetings;
  atomic_store(&seat->arrived, meeting);
  if (atomic_load(&room->asleep) > 0 && all_there(room, devices, meeting)) wake_all(room);
  if (devices <= cores()) {
    int64_t end = nanoseconds() + seat->spin;
    do {
      for (int i = 0; i < LOOKS; i++) {
        if (all_there(room, devices, meeting)) {
          seat->spin = seat->spin * 2 < SPIN_NS ? seat->spin * 2 : SPIN_NS;
          return TOGETHER;
        }
        pause_briefly();
      }
    } while (nanoseconds() < end);
    seat->spin = seat->spin / 2 > LEAST_SPIN_NS ? seat->spin / 2 : LEAST_SPIN_NS;
  }
  int64_t waited = 0, seen = nanoseconds();
  Outcome outcome = TOGETHER;
  pthread_mutex_lock(&room->lock);
  atomic_fetch_add(&room->asleep, 1);
  while (!all_there(room, devices, meeting)) {
    if (atomic_load(&room->broken)) outcome = BROKEN;
    else if (waited > PATIENCE_S * SECOND_NS) outcome = LATE;
    if (outcome != TOGETHER) break;
    struct timespec until;  // by the wall clock, which may be set: so a second at a time, and patience by another clock
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    pthread_cond_timedwait(&room->news, &room->lock, &until);
    int64_t now = nanoseconds(), passed = now - seen;
    waited += passed < 2 * SECOND_NS ? passed : 2 * SECOND_NS;  // longer: the process was stopped, the others too
    seen = now;
  }
  atomic_fetch_sub(&room->asleep, 1);
  pthread_mutex_unlock(&room->lock);
  return outcome;
}

// --- sums ------------------------------------------------------------------------------------------------------------

// Shards `start` to `start + length`: those of a device, or those that a node of the tree is the sum of.
typedef struct {
  size_t start, length;
} Span;

typedef struct {
  Span span;
  const float *data;
} Part;

// Contiguous ranges whose lengths differ by one at most, the longer ones first.
static Span owned_by(size_t device, size_t devices, size_t shards) {
  size_t least = shards / devices, more = shards % devices;
  return (Span){device * least + (device < more ? device : more), least + (device < more ? 1 : 0)};
}

// A node of `length` > 1 shards is the sum of two: the left one has the largest power of two below it.
static size_t left_of(size_t length) {
  size_t left = 1;
  while (left * 2 < length) left *= 2;
  return left;
}

// Append the maximal nodes below `node` that lie inside a range, from left to right; their number then.
static size_t add_nodes(Span range, Span node, Span nodes[], size_t n) {
  size_t end = range.start + range.length, node_end = node.start + node.length;
  if (node_end <= range.start || end <= node.start) return n;
  if (range.start <= node.start && node_end <= end) {
    nodes[n] = node;
    return n + 1;
  }
  size_t left = left_of(node.length);
  n = add_nodes(range, (Span){node.start, left}, nodes, n);
  return add_nodes(range, (Span){node.start + left, node.length - left}, nodes, n);
}

static size_t nodes_of(size_t device, size_t devices, size_t shards, Span nodes[]) {
  return add_nodes(owned_by(device, devices, shards), (Span){0, shards}, nodes, 0);
}

// Sum of n parts, which are all that a node consists of, by the tree: `count` columns (at most BLOCK) from column `at`.
static void sum_block(const Part *parts, size_t n, size_t at, size_t count, float *out) {
  const float *a = parts[0].data + at;
  if (n == 1) {
    memcpy(out, a, count * sizeof(float));
  } else if (n == 2) {
    const float *b = parts[1].data + at;
    for (size_t i = 0; i < count; i++) out[i] = a[i] + b[i];
  } else {
    float right[BLOCK];
    const Span *first = &parts[0].span, *last = &parts[n - 1].span;
    size_t middle = first->start + left_of(last->start + last->length - first->start), left = 1;
    while (parts[left].span.start < middle) left++;
    sum_block(parts, left, at, count, out);
    sum_block(parts + left, n - left, at, count, right);
    for (size_t i = 0; i < count; i++) out[i] = out[i] + right[i];
  }
}

static void tree_sum(const Part *parts, size_t n, size_t first, size_t last, float *out) {
  for (size_t at = first; at < last; at += BLOCK) {
    size_t count = last - at < BLOCK ? last - at : BLOCK;
    sum_block(parts, n, at, count, out + (at - first));
  }
}

// --- custom calls ----------------------------------------------------------------------------------------------------

static XLA_FFI_Error *error_of(XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// XLA asks a handler for its version with a call that has this extension, whose base has another name in each version.
static bool tells_version(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Metadata_Extension *extension = (XLA_FFI_Metadata_Extension *)frame->extension_start;
  if (extension == NULL || extension->extension_base.type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata *metadata = extension->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  metadata->state_type_id.type_id = 0;
  return true;
}

static size_t width_of(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
      return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
      return 8;
    default:
      return 0;
  }
}

typedef struct {
  const char *data;  // [batch, rows, columns]
  size_t batch, rows, columns, width;
  int device, devices;
  int64_t number;  // which of the program's calls it is
  size_t shards;   // of a sum, as are the next two
  bool sliced;
  size_t count;    // of this device's nodes
  Span nodes[MOST_NODES];
  char *out;
  Room *room;  // NULL for one device
  Seat *seat;
  char *message;
} Call;

static void leave(Call *call) {
  atomic_store(&call->seat->occupied, 0);
  atomic_fetch_sub(&call->room->inside, 1);
}

// This device's place for its next message of `bytes`; an error, or NULL.
static XLA_FFI_Error *begin_message(XLA_FFI_CallFrame *frame, Call *call, size_t bytes, size_t alike) {
  call->message = prepare(call->seat, call->number, bytes, alike);
  if (call->message != NULL) return NULL;
  give_up(call->room);
  return error_of(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "lockstep: no memory for a device's message");
}

// What a call is about, and this device's place for its message; an error, or NULL.
static XLA_FFI_Error *begin(XLA_FFI_CallFrame *frame, Call *call, bool sums) {
  const XLA_FFI_Buffer *x = frame->args.args[0], *index = frame->args.args[1], *out = frame->rets.rets[0];
  const XLA_FFI_Scalar *number = frame->attrs.attrs[0], *devices = frame->attrs.attrs[1];  // sorted by name
  call->width = width_of(x->dtype);
  if (x->rank < 2 || x->dims[x->rank - 2] < 1 || call->width == 0 || (sums && x->dtype != XLA_FFI_DataType_F32)) {
    return error_of(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "lockstep: a message of a shape or type that can't be");
  }
  call->data = x->data;
  call->out = out->data;
  call->columns = (size_t)x->dims[x->rank - 1];
  call->rows = (size_t)x->dims[x->rank - 2];
  call->batch = 1;
  for (int64_t i = 0; i < x->rank - 2; i++) call->batch *= (size_t)x->dims[i];
  call->device = *(const int32_t *)index->data;
  call->devices = (int)*(const int64_t *)devices->value;
  if (call->devices < 1 || call->devices > MOST_DEVICES || call->device < 0 || call->device >= call->devices) {
    return error_of(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "lockstep: more than 64 devices, or none of them");
  }
  call->number = *(const int64_t *)number->value;
  if (sums) {
    call->shards = (size_t) * (const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[2])->value;
    call->sliced = *(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[3])->value != 0;
    if (call->shards < (size_t)call->devices || call->shards > MOST_SHARDS ||
        call->rows < owned_by((size_t)call->device, (size_t)call->devices, call->shards).length) {
      return error_of(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "lockstep: shards that devices can't share");
    }
    call->count = nodes_of((size_t)call->device, (size_t)call->devices, call->shards, call->nodes);
  }
  call->room = NULL;
  if (call->devices == 1) return NULL;
  XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, frame->ctx, 0};
  XLA_FFI_Error *error = frame->api->XLA_FFI_RunId_Get(&run);
  if (error != NULL) return error;
  call->room = enter(run.run_id);
  if (call->room == NULL) {
    return error_of(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "lockstep: too many programs run at once");
  }
  call->seat = &call->room->seats[call->device];
  if (atomic_exchange(&call->seat->occupied, 1) != 0) {
    give_up(call->room);
    atomic_fetch_sub(&call->room->inside, 1);
    return error_of(frame, XLA_FFI_Error_Code_INTERNAL, "lockstep: a device is in two collectives at once");
  }
  size_t row = call->batch * call->columns * call->width;
  error = begin_message(frame, call, sums ? call->count * row : call->rows * row, sums ? row : call->rows * row);
  if (error != NULL) leave(call);
  return error;
}

// Wait for the messages of all devices; an error, or NULL and where they are.
static XLA_FFI_Error *exchange(XLA_FFI_CallFrame *frame, Call *call, const char *messages[]) {
  char text[160];
  Outcome outcome = meet(call->room, call->devices, call->device);
  if (outcome == BROKEN) return error_of(frame, XLA_FFI_Error_Code_ABORTED, "lockstep: another device has failed");
  if (outcome == LATE) {
    give_up(call->room);
    snprintf(text, sizeof text, "lockstep: device %d of %d has waited %d s for the others", call->device, call->devices,
             PATIENCE_S);
    return error_of(frame, XLA_FFI_Error_Code_DEADLINE_EXCEEDED, text);
  }
  int place = (int)(call->seat->meetings & 1);
  for (int i = 0; i < call->devices; i++) {
    const Seat *seat = &call->room->seats[i];
    if (seat->call[place] != call->seat->call[place]) {
      give_up(call->room);
      snprintf(text, sizeof text, "lockstep: devices %d and %d met in different collectives", call->device, i);
      return error_of(frame, XLA_FFI_Error_Code_INTERNAL, text);
    }
    if (seat->bytes[place] != call->seat->bytes[place]) {
      give_up(call->room);
      snprintf(text, sizeof text, "lockstep: devices %d and %d met with messages of %zu and %zu bytes", call->device, i,
               call->seat->bytes[place], seat->bytes[place]);
      return error_of(frame, XLA_FFI_Error_Code_INTERNAL, text);
    }
    messages[i] = seat->message[place];
  }
  return NULL;
}

// The nodes of all devices, from left to right, of one of the batch: where they lie in the devices' messages.
static size_t parts_of(const Call *call, const char *messages[], size_t i, Part parts[]) {
  size_t n = 0;
  Span nodes[MOST_NODES];
  for (int j = 0; j < call->devices; j++) {
    size_t count = nodes_of((size_t)j, (size_t)call->devices, call->shards, nodes);
    for (size_t k = 0; k < count; k++) {
      parts[n++] = (Part){nodes[k], (const float *)messages[j] + (i * count + k) * call->columns};
    }
  }
  return n;
}

// The columns that a device finishes of a sum that goes by slices.
static Span slice_of(const Call *call, int device) {
  size_t devices = (size_t)call->devices;
  size_t length = (call->columns + devices * LINE_FLOATS - 1) / (devices * LINE_FLOATS) * LINE_FLOATS;
  size_t first = (size_t)device * length, last = first + length;
  if (first > call->columns) first = call->columns;
  if (last > call->columns) last = call->columns;
  return (Span){first, last - first};
}

// Each device finishes its slice of the columns, and all bring theirs together; an error, or NULL.
static XLA_FFI_Error *finish_slices(XLA_FFI_CallFrame *frame, Call *call, const char *messages[]) {
  Span mine = slice_of(call, call->device);
  XLA_FFI_Error *error = begin_message(frame, call, call->batch * mine.length * sizeof(float),
                                       call->batch * call->columns * sizeof(float));
  if (error != NULL) return error;
  Part parts[MOST_DEVICES * MOST_NODES];
  for (size_t i = 0; i < call->batch; i++) {
    size_t n = parts_of(call, messages, i, parts);
    tree_sum(parts, n, mine.start, mine.start + mine.length, (float *)call->message + i * mine.length);
  }
  error = exchange(frame, call, messages);
  for (int j = 0; error == NULL && j < call->devices; j++) {
    Span slice = slice_of(call, j);
    for (size_t i = 0; i < call->batch; i++) {
      memcpy((float *)call->out + i * call->columns + slice.start, (const float *)messages[j] + i * slice.length,
             slice.length * sizeof(float));
    }
  }
  return error;
}

// Sum over all shards, f32 [..., rows, columns] to [..., columns], by the fixed tree over them. A device's own shards
// are its first rows. Arguments: the rows, and the device's index; attributes: which of the program's calls it is, the
// numbers of devices and of shards, and whether devices exchange slices.
XLA_FFI_Error *lockstep_tree_sum(XLA_FFI_CallFrame *frame) {
  if (tells_version(frame)) return NULL;
  Call call;
  XLA_FFI_Error *error = begin(frame, &call, true);
  if (error != NULL) return error;
  float *own = (float *)(call.room == NULL ? call.out : call.message);
  size_t first = owned_by((size_t)call.device, (size_t)call.devices, call.shards).start;
  for (size_t i = 0; i < call.batch; i++) {
    const float *rows = (const float *)call.data + i * call.rows * call.columns;
    for (size_t k = 0; k < call.count; k++) {
      Part shards[MOST_SHARDS];
      for (size_t m = 0; m < call.nodes[k].length; m++) {
        size_t shard = call.nodes[k].start + m;
        shards[m] = (Part){{shard, 1}, rows + (shard - first) * call.columns};
      }
      tree_sum(shards, call.nodes[k].length, 0, call.columns, own + (i * call.count + k) * call.columns);
    }
  }
  if (call.room == NULL) return NULL;
  const char *messages[MOST_DEVICES];
  error = exchange(frame, &call, messages);
  if (error == NULL && call.sliced) {
    error = finish_slices(frame, &call, messages);
  } else if (error == NULL) {
    Part parts[MOST_DEVICES * MOST_NODES];
    for (size_t i = 0; i < call.batch; i++) {
      size_t n = parts_of(&call, messages, i, parts);
      tree_sum(parts, n, 0, call.columns, (float *)call.out + i * call.columns);
    }
  }
  leave(&call);
  return error;
}

// The rows of all devices in the devices' order, [..., rows, columns] to [..., devices * rows, columns], of any type.
// Arguments and attributes as above.
XLA_FFI_Error *lockstep_gather(XLA_FFI_CallFrame *frame) {
  if (tells_version(frame)) return NULL;
  Call call;
  XLA_FFI_Error *error = begin(frame, &call, false);
  if (error != NULL) return error;
  size_t bytes = call.rows * call.columns * call.width;
  if (call.room == NULL) {
    memcpy(call.out, call.data, call.batch * bytes);
    return NULL;
  }
  memcpy(call.message, call.data, call.batch * bytes);
  const char *messages[MOST_DEVICES];
  error = exchange(frame, &call, messages);
  for (size_t i = 0; error == NULL && i < call.batch; i++) {
    for (int j = 0; j < call.devices; j++) {
      memcpy(call.out + (i * (size_t)call.devices + (size_t)j) * bytes, messages[j] + i * bytes, bytes);
    }
  }
  leave(&call);
  return error;
}
