//! Streams.

use crate::support::doubles::ascendcl::{made, says};

rules! {
    STREAMS:

    str_1_a_stream_that_is_gone (ready) |a| {
        let stream = a.stream();
        says!(a, 0, "aclrtDestroyStream", stream);
        says!(a, 107_017, "aclrtDestroyStream", stream);
        says!(a, 107_017, "aclrtSynchronizeStream", stream);
        says!(a, 107_017, "aclrtRecordEvent", a.event(), stream);
        a.broken(&["STR-1"; 3]);
    }

    str_2_a_stream_with_work (ready) |a| {
        let (stream, memory, mut host) = (a.stream(), a.memory(64), a.host(256));
        host.fill(7);
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtDestroyStream", stream);
        a.broken(&["STR-2"]);
        assert_eq!(a.read(memory, 64), [7; 64]);
        // A forced destruction runs none of it.
        let stream = a.stream();
        says!(a, 0, "aclrtMemsetAsync", memory, 64, 9, 64, stream);
        says!(a, 0, "aclrtDestroyStreamForce", stream);
        assert_eq!(a.read(memory, 64), [7; 64]);
        a.broken(&["STR-2", "STR-2"]);
        // Events alone are not work that a call waits for.
        let stream = a.stream();
        says!(a, 0, "aclrtRecordEvent", a.event(), stream);
        says!(a, 0, "aclrtDestroyStream", stream);
        a.broken(&["STR-2", "STR-2"]);
    }

    str_3_a_stream_that_waits_for_a_model (ready) |a| {
        made!(a, "aclrtCreateStreamWithConfig", 0, 3);
        a.broken(&[]);
        made!(a, "aclrtCreateStreamWithConfig", 0, 4);
        made!(a, "aclrtCreateStreamWithConfig", 0, 0x20);
        a.broken(&["STR-3", "STR-3"]);
    }
}
