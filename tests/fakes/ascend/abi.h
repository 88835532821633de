// Types, codes and layouts of the two libraries, as far as the fake has them.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

typedef int aclError;
typedef void *aclrtContext;
typedef void *aclrtStream;
typedef void *aclrtEvent;
typedef void *HcclComm;
typedef int HcclResult;

enum {
    ACL_OK = 0,
    ACL_INVALID_PARAM = 100000,
    ACL_UNINITIALIZE = 100001,
    ACL_REPEAT_INITIALIZE = 100002,
    ACL_REPEAT_FINALIZE = 100037,
    ACL_API_NOT_SUPPORT = 200001,
    RT_PARAM_INVALID = 107000,
    RT_INVALID_DEVICEID = 107001,
    RT_CONTEXT_NULL = 107002,
    RT_STREAM_CONTEXT = 107003,
    RT_INVALID_HANDLE = 107017,
    RT_STREAM_ABORT = 107023,
    RT_FEATURE_NOT_SUPPORT = 207000,
    RT_MEMORY_ALLOCATION = 207001,
    RT_NO_STREAM = 207008,
    RT_STREAM_SYNC_TIMEOUT = 507046,
    RT_EVENT_SYNC_TIMEOUT = 507047,
    RT_LINK_ERROR = 507056,
    RT_SUSPECT_REMOTE_ERROR = 507057,
};

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, COPY_DEFAULT };
enum { LOCATION_HOST, LOCATION_DEVICE, LOCATION_UNREGISTERED };
enum { STREAM_COMPLETE, STREAM_NOT_READY };
enum { EVENT_NOT_READY, EVENT_COMPLETE };
enum { SUPER_POD_DEVICE_ID = 403, SUPER_POD_SERVER_ID = 404, SUPER_POD_ID = 405 };

enum {
    HCCL_OK = 0,
    HCCL_PARA = 1,
    HCCL_PTR = 2,
    HCCL_INTERNAL = 4,
    HCCL_NOT_SUPPORT = 5,
    HCCL_NOT_FOUND = 6,
    HCCL_UNAVAIL = 7,
    HCCL_TIMEOUT = 9,
    HCCL_RUNTIME = 15,
    HCCL_NETWORK = 19,
    HCCL_AGAIN = 20,
};

enum { MEMORY_DEVICE, MEMORY_HOST };

typedef struct {
    uint32_t id;
    int type;
} aclrtMemLocation;

typedef struct {
    aclrtMemLocation dstLoc;
    aclrtMemLocation srcLoc;
    uint8_t rsv[16];
} aclrtMemcpyBatchAttr;

typedef struct {
    aclrtMemLocation location;
    uint32_t pageSize;
    uint32_t rsv[4];
} aclrtPtrAttributes;

typedef struct {
    void *addr;
    size_t len;
    size_t reserved[14];
} aclrtMemUceInfo;

typedef struct {
    int type;
    void *addr;
    uint64_t size;
} CommMem;

typedef struct {
    char desc[512];
} HcclMemDesc;

typedef struct {
    HcclMemDesc *array;
    unsigned int arrayLength;
} HcclMemDescs;

typedef struct {
    void *localAddr;
    void *remoteAddr;
    unsigned long long count;
    int dataType;
} HcclOneSideOpDesc;

typedef struct {
    int topoType;
    unsigned long long reserved[3];
} HcclPrepareConfig;

typedef struct {
    size_t size;
    uint32_t magic;
    uint32_t version;
    uint64_t reserved;
    uint32_t hcclBufferSize;
    uint32_t hcclDeterministic;
    char hcclCommName[128];
    char hcclUdi[128];
    uint32_t hcclOpExpansionMode;
    uint32_t hcclRdmaTrafficClass;
    uint32_t hcclRdmaServiceLevel;
    uint32_t hcclWorldRankID;
    uint64_t hcclJobID;
    uint8_t aclGraphZeroCopyEnable;
    int32_t hcclExecTimeOut;
    char hcclAlgo[1600];
    char hcclRetryEnable[50];
    char hcclRetryParams[128];
    char hcclBufferName[128];
    uint32_t hcclQos;
    uint64_t hcclSymWinMaxMemSizePerRank;
    uint32_t hcclChannelSqDepth;
} HcclCommConfig;

#define HCCL_CONFIG_MAGIC 0xf0f0f0f0u

// One table for the assertions here and for fake_layout(), which a test compares with the ctypes structures.
#define SIZES(SIZE)                                                                                                    \
    SIZE(aclrtMemLocation, 8, 4)                                                                                       \
    SIZE(aclrtMemcpyBatchAttr, 32, 4)                                                                                  \
    SIZE(aclrtPtrAttributes, 28, 4)                                                                                    \
    SIZE(aclrtMemUceInfo, 128, 8)                                                                                      \
    SIZE(CommMem, 24, 8)                                                                                               \
    SIZE(HcclMemDesc, 512, 1)                                                                                          \
    SIZE(HcclMemDescs, 16, 8)                                                                                          \
    SIZE(HcclOneSideOpDesc, 32, 8)                                                                                     \
    SIZE(HcclPrepareConfig, 32, 8)                                                                                     \
    SIZE(HcclCommConfig, 2248, 8)

#define FIELDS(FIELD)                                                                                                  \
    FIELD(aclrtMemLocation, id, 0, 4)                                                                                  \
    FIELD(aclrtMemLocation, type, 4, 4)                                                                                \
    FIELD(aclrtMemcpyBatchAttr, dstLoc, 0, 8)                                                                          \
    FIELD(aclrtMemcpyBatchAttr, srcLoc, 8, 8)                                                                          \
    FIELD(aclrtMemcpyBatchAttr, rsv, 16, 16)                                                                           \
    FIELD(aclrtPtrAttributes, location, 0, 8)                                                                          \
    FIELD(aclrtPtrAttributes, pageSize, 8, 4)                                                                          \
    FIELD(aclrtPtrAttributes, rsv, 12, 16)                                                                             \
    FIELD(aclrtMemUceInfo, addr, 0, 8)                                                                                 \
    FIELD(aclrtMemUceInfo, len, 8, 8)                                                                                  \
    FIELD(aclrtMemUceInfo, reserved, 16, 112)                                                                          \
    FIELD(CommMem, type, 0, 4)                                                                                         \
    FIELD(CommMem, addr, 8, 8)                                                                                         \
    FIELD(CommMem, size, 16, 8)                                                                                        \
    FIELD(HcclMemDescs, array, 0, 8)                                                                                   \
    FIELD(HcclMemDescs, arrayLength, 8, 4)                                                                             \
    FIELD(HcclOneSideOpDesc, localAddr, 0, 8)                                                                          \
    FIELD(HcclOneSideOpDesc, remoteAddr, 8, 8)                                                                         \
    FIELD(HcclOneSideOpDesc, count, 16, 8)                                                                             \
    FIELD(HcclOneSideOpDesc, dataType, 24, 4)                                                                          \
    FIELD(HcclPrepareConfig, topoType, 0, 4)                                                                           \
    FIELD(HcclPrepareConfig, reserved, 8, 24)                                                                          \
    FIELD(HcclCommConfig, size, 0, 8)                                                                                  \
    FIELD(HcclCommConfig, magic, 8, 4)                                                                                 \
    FIELD(HcclCommConfig, version, 12, 4)                                                                              \
    FIELD(HcclCommConfig, reserved, 16, 8)                                                                             \
    FIELD(HcclCommConfig, hcclBufferSize, 24, 4)                                                                       \
    FIELD(HcclCommConfig, hcclDeterministic, 28, 4)                                                                    \
    FIELD(HcclCommConfig, hcclCommName, 32, 128)                                                                       \
    FIELD(HcclCommConfig, hcclUdi, 160, 128)                                                                           \
    FIELD(HcclCommConfig, hcclOpExpansionMode, 288, 4)                                                                 \
    FIELD(HcclCommConfig, hcclRdmaTrafficClass, 292, 4)                                                                \
    FIELD(HcclCommConfig, hcclRdmaServiceLevel, 296, 4)                                                                \
    FIELD(HcclCommConfig, hcclWorldRankID, 300, 4)                                                                     \
    FIELD(HcclCommConfig, hcclJobID, 304, 8)                                                                           \
    FIELD(HcclCommConfig, aclGraphZeroCopyEnable, 312, 1)                                                              \
    FIELD(HcclCommConfig, hcclExecTimeOut, 316, 4)                                                                     \
    FIELD(HcclCommConfig, hcclAlgo, 320, 1600)                                                                         \
    FIELD(HcclCommConfig, hcclRetryEnable, 1920, 50)                                                                   \
    FIELD(HcclCommConfig, hcclRetryParams, 1970, 128)                                                                  \
    FIELD(HcclCommConfig, hcclBufferName, 2098, 128)                                                                   \
    FIELD(HcclCommConfig, hcclQos, 2228, 4)                                                                            \
    FIELD(HcclCommConfig, hcclSymWinMaxMemSizePerRank, 2232, 8)                                                        \
    FIELD(HcclCommConfig, hcclChannelSqDepth, 2240, 4)

#define ASSERT_SIZE(type, size, align) _Static_assert(sizeof(type) == size && _Alignof(type) == align, #type);
#define ASSERT_FIELD(type, field, offset, size)                                                                        \
    _Static_assert(offsetof(type, field) == offset && sizeof(((type *)0)->field) == size, #type "." #field);
SIZES(ASSERT_SIZE)
FIELDS(ASSERT_FIELD)
