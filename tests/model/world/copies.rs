//! Copies to and from the devices, claims on a stream, and handles dropped meanwhile.

use super::*;

const UPLOAD: &str = "cuMemcpyHtoDAsync_v2";
const DOWNLOAD: &str = "cuMemcpyDtoHAsync_v2";

impl World<'_> {
    pub(super) fn take_buf(&mut self, at: usize) -> Option<Held<PinnedBuf>> {
        (!self.bufs.is_empty()).then(|| self.bufs.swap_remove(at % self.bufs.len()))
    }

    /// A buffer whose bytes can be told from blank memory, which a download may have brought.
    fn take_sendable(&mut self, at: usize) -> Option<Held<PinnedBuf>> {
        let mut live = self.take_buf(at)?;
        if live.bytes.contains(&BLANK) {
            live.bytes = pattern(self.id(), live.bytes.len());
            live.buf.copy_from_slice(&live.bytes);
        }
        Some(live)
    }

    pub(super) fn lane(&self, at: usize) -> usize {
        at % self.lanes.len()
    }

    /// Blank device memory.
    pub(super) fn memory(&mut self, device: usize, len: usize) -> Option<DeviceSlice> {
        let alloc = || self.devices[device].alloc(len).ok();
        if self.dead[device] { None } else { self.machine.calmly(alloc) }
    }

    /// An error of a submit.
    fn submit_error(&self, error: &Error) {
        assert!(self.tolerant(), "no fault, and yet: {error}");
        assert!(matches!(error, Error::Device(_)), "unexpected: {error}");
    }

    /// Whether a submit is queued: one that failed may be all the same.
    fn is_queued<T, E>(&self, result: &Result<T, E>, call: &str) -> bool {
        let anyway = self.armed == Some((call, Failure::RunsAnyway)) && !self.machine.is_armed();
        result.is_ok() || anyway
    }

    /// A copy was queued that uses this host memory.
    fn queued(&mut self, lane: usize, host: Range, seen: Seen, allowed: Vec<Vec<u8>>) -> u64 {
        let id = self.id();
        self.copies.push(Copy { id, lane, host, seen, allowed, dead: false });
        id
    }

    /// The same of an upload.
    fn sent(&mut self, lane: usize, host: Range, memory: DeviceSlice, bytes: Vec<u8>) -> u64 {
        let seen = Seen::Device(memory.slice(..).unwrap());
        let copy = self.queued(lane, host, seen, vec![bytes.clone()]);
        if self.regions.len() >= REGIONS {
            self.regions.remove(0);
        }
        self.regions.push(Region { memory, lane, copy, bytes });
        copy
    }

    /// What came of the submit of a buffer with these bytes.
    fn submitted(
        &mut self,
        result: Result<InFlight<PinnedBuf>, SubmitError<PinnedBuf>>,
        bytes: Vec<u8>,
        trip: Trip,
        keep: Keep,
    ) {
        match result {
            Ok(flight) => self.keep(Flight { handle: Handle::Own(flight), trip, flag: None }, keep),
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(trip.after.is_empty(), "queued, and yet the buffer came back");
                self.submit_error(&error);
                self.tally.note("submit refused, buffer back");
                self.bufs.push(Held { buf, bytes });
            }
            Err(SubmitError { error, buffer: None }) => {
                self.submit_error(&error);
                if !trip.after.is_empty() {
                    self.tally.note("submit that failed but runs");
                }
                self.detached.push(trip.capacity);
                // Its device may have died by it.
                if self.devices[self.lanes[trip.lane].device].lost().is_some() {
                    self.graves.extend(trip.range);
                }
            }
        }
    }

    pub(super) fn upload(
        &mut self,
        at: usize,
        lane: usize,
        part: Option<(u8, u8)>,
        keep: Keep,
        orphan: bool,
    ) {
        let lane = self.lane(lane);
        let Some(Held { buf, bytes }) = self.take_sendable(at) else { return };
        let (start, end) = match part {
            None => (0, bytes.len()),
            Some((a, b)) => {
                let start = bytes.len() * usize::from(a.min(b)) / 256;
                let end = bytes.len() * (usize::from(a.max(b)) + 1) / 256;
                (start, end.max(start + 1).min(bytes.len()))
            }
        };
        if start >= end {
            return self.bufs.push(Held { buf, bytes });
        }
        let Some(memory) = self.memory(self.lanes[lane].device, end - start) else {
            let buf = self.upload_to_ruins(buf, lane);
            return self.bufs.push(Held { buf, bytes });
        };
        let stream = self.lanes[lane].stream.clone();
        let (host, mut trip) = (range(&buf), Trip::of(&buf, lane, vec![bytes.clone()]));
        let result = match part {
            None => stream.upload(buf, &memory),
            Some(_) => stream.upload_part(buf, start..end, memory.slice(..)),
        };
        if self.is_queued(&result, UPLOAD) {
            self.tally.note(if part.is_some() { "upload of a part" } else { "upload" });
            trip.after.push(if orphan {
                // No copy that the model looks for has this number.
                self.tally.note("device memory dropped under a copy");
                0
            } else {
                self.sent(lane, host, memory, bytes[start..end].to_vec())
            });
        }
        self.submitted(result, bytes, trip, keep);
    }

    /// A dead device refuses the copy, and the buffer comes back as it was.
    fn upload_to_ruins(&mut self, buf: PinnedBuf, lane: usize) -> PinnedBuf {
        let Lane { stream, device, .. } = &self.lanes[lane];
        let Some(memory) = self.ruins[*device].as_ref().filter(|m| m.len() >= buf.len()) else { return buf };
        if self.devices[*device].lost().is_none() {
            return buf; // No call has found the device dead yet.
        }
        match stream.upload(buf, memory) {
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(error.is_device_lost(), "{error}");
                self.tally.note("upload refused by a dead device");
                buf
            }
            other => panic!("the device is dead, and yet: {other:?}"),
        }
    }

    pub(super) fn download(&mut self, at: usize, lane: usize, region: usize, keep: Keep) {
        let lane = self.lane(lane);
        let Some((slice, allowed)) = self.source(lane, region) else { return };
        let mut fit = (0..self.bufs.len()).map(|i| (i + at) % self.bufs.len());
        let Some(at) = fit.find(|&i| self.bufs[i].buf.capacity() >= slice.len()) else { return };
        let Held { mut buf, mut bytes } = self.bufs.swap_remove(at);
        while buf.len() < slice.len() || allowed.contains(&buf[..slice.len()].to_vec()) {
            // So that the bytes before the copy are known, and differ from those that the copy brings.
            bytes = pattern(self.id(), slice.len());
            buf.clear();
            buf.extend_from_slice(&bytes);
        }
        let (host, mut trip) = (range(&buf), Trip::of(&buf, lane, allowed.clone()));
        let before = bytes[..slice.len()].to_vec();
        let result = self.lanes[lane].stream.download(slice, buf);
        if self.is_queued(&result, DOWNLOAD) {
            self.tally.note("download");
            trip.after.push(self.queued(lane, host, Seen::Host(host.0, before), allowed));
        }
        self.submitted(result, bytes, trip, keep);
    }

    /// Device memory to download from, and what it may hold when a copy on that lane reads it.
    fn source(&mut self, lane: usize, region: usize) -> Option<(DeviceSlice, Vec<Vec<u8>>)> {
        let device = self.lanes[lane].device;
        if !self.dead[device] {
            self.sweep();
        }
        let mut there: Vec<_> = self.regions.iter().collect();
        there.retain(|region| self.lanes[region.lane].device == device);
        let region = there.get(region % there.len().max(1))?;
        let ordered = region.lane == lane || !self.copies.iter().any(|c| c.id == region.copy);
        let mut allowed = vec![region.bytes.clone()];
        if !ordered {
            allowed.push(vec![BLANK; region.bytes.len()]);
        }
        Some((region.memory.slice(..).unwrap(), allowed))
    }

    pub(super) fn share(&mut self, at: usize, lane: usize, other: usize, keep: Keep) {
        let Some(Held { buf, bytes }) = self.take_sendable(at) else { return };
        if bytes.is_empty() {
            return self.bufs.push(Held { buf, bytes });
        }
        let buf = Arc::new(buf);
        for lane in [self.lane(lane), self.lane(other)] {
            let Some(memory) = self.memory(self.lanes[lane].device, bytes.len()) else { continue };
            let mut trip = Trip::of(&buf, lane, vec![bytes.clone()]);
            let result = self.lanes[lane].stream.upload(buf.clone(), &memory);
            if self.is_queued(&result, UPLOAD) {
                self.tally.note("upload shared by two streams");
                trip.after.push(self.sent(lane, range(&buf), memory, bytes.clone()));
            }
            match result {
                // Forgetting it would keep a count for ever, and the model with it.
                Ok(flight) => {
                    let keep = if keep == Keep::Forget { Keep::Drop } else { keep };
                    self.keep(Flight { handle: Handle::Shared(flight), trip, flag: None }, keep);
                }
                Err(SubmitError { error, .. }) => self.submit_error(&error),
            }
        }
        self.shared.push(Held { buf, bytes });
    }

    pub(super) fn drop_shared(&mut self, at: usize) {
        if !self.shared.is_empty() {
            let shared = self.shared.swap_remove(at % self.shared.len());
            self.detached.push(shared.buf.capacity());
        }
    }

    pub(super) fn hold(&mut self, at: usize, lane: usize, keep: Keep) {
        let lane = self.lane(lane);
        let Some(Held { buf, bytes }) = self.take_buf(at) else { return };
        self.sweep();
        let mut trip = Trip::of(&buf, lane, vec![bytes.clone()]);
        let result = self.lanes[lane].stream.hold(buf);
        match &result {
            Ok(_) => {
                self.tally.note("hold");
                trip.after = self.outstanding(lane);
            }
            Err(SubmitError { buffer: Some(_), .. }) => {}
            Err(SubmitError { buffer: None, .. }) => {
                self.graves.extend(trip.range);
                self.may_lose = true;
            }
        }
        self.submitted(result, bytes, trip, keep);
    }

    pub(super) fn claim(&mut self, lane: usize, size: Size, usage: Use) {
        let lane = self.lane(lane);
        let buf = match self.pool().try_checkout_on(&self.lanes[lane].stream, Self::request(size)) {
            Ok(buf) => buf,
            Err(error) => return self.refused(&[size], &error),
        };
        assert_eq!(buf.capacity(), size.len);
        self.tally.note(if buf.was_claimed() { "claim" } else { "stream-ready but free" });
        match usage {
            Use::Drop => self.unclaim(buf),
            Use::Wait => {
                let claimed = buf.was_claimed();
                match buf.wait() {
                    Ok(buf) => {
                        if claimed {
                            self.tally.note("claim waited for");
                        }
                        self.admit(buf, size);
                    }
                    // It returned to where it was.
                    Err(error) => {
                        self.detached.push(size.len);
                        if !matches!(error, Error::Timeout(_)) {
                            self.submit_error(&error);
                        }
                    }
                }
            }
            Use::OtherStream => {
                let other = (lane + 1) % self.lanes.len();
                let Some(memory) = self.memory(self.lanes[other].device, 1) else { return self.unclaim(buf) };
                match self.lanes[other].stream.download(&memory, buf) {
                    Err(SubmitError {
                        error: Error::Mismatch { what: "a stream-ready buffer", .. },
                        buffer: Some(buf),
                    }) => {
                        self.tally.note("refused: wrong stream");
                        self.unclaim(buf);
                    }
                    wrong => panic!("used on another stream: {wrong:?}"),
                }
            }
            Use::Land(keep) => self.land(lane, buf, keep),
        }
    }

    pub(super) fn crowd(&mut self, lane: usize, size: Size, usages: &[Use]) {
        for at in 0..64 {
            let before = self.bufs.len();
            self.checkout(size, Patience::Try, Who::Main);
            if self.bufs.len() == before {
                break;
            }
            self.upload(before, lane + at % 3 / 2, None, Keep::Drop, at % 5 == 4);
        }
        for usage in usages {
            self.check();
            self.claim(lane, size, *usage);
        }
    }

    fn unclaim(&mut self, buf: StreamBuf) {
        if buf.was_claimed() {
            self.tally.note("claim dropped unused");
            self.detached.push(buf.capacity());
        }
    }

    /// Downloads into a stream-ready buffer.
    fn land(&mut self, lane: usize, buf: StreamBuf, keep: Keep) {
        let source = self.source(lane, usize::from(buf.was_claimed()));
        let Some((slice, allowed)) = source.filter(|s| s.0.len() <= buf.capacity()) else {
            return self.unclaim(buf);
        };
        let (capacity, claimed) = (buf.capacity(), buf.was_claimed());
        match self.lanes[lane].stream.download(slice, buf) {
            Ok(flight) => {
                if claimed {
                    self.tally.note("claim used");
                    // Which segment it was is not known, so one of the downloads to segments whose handles were dropped
                    // on this stream may be overwritten before the model has seen it.
                    let kept: Vec<Range> = self.flights.iter().filter_map(|f| f.trip.range).collect();
                    self.copies.retain(|c| {
                        let given_up = !kept.iter().any(|range| overlap(*range, c.host));
                        c.lane != lane || c.dead || matches!(c.seen, Seen::Device(_)) || !given_up
                    });
                }
                let trip = Trip { lane, range: None, capacity, allowed, after: self.outstanding(lane) };
                self.keep(Flight { handle: Handle::Own(flight), trip, flag: None }, keep);
            }
            Err(SubmitError { error, buffer }) => {
                self.submit_error(&error);
                match buffer {
                    Some(buf) => self.unclaim(buf),
                    None => self.detached.push(capacity),
                }
            }
        }
    }

    pub(super) fn on_device(&mut self, lane: usize, region: usize) {
        let lane = self.lane(lane);
        let Some((slice, _)) = self.source(lane, region) else { return };
        let Some(memory) = self.memory(self.lanes[lane].device, slice.len()) else { return };
        match self.lanes[lane].stream.copy(slice, memory) {
            Ok(flight) => {
                self.tally.note("copy within the device");
                let (after, allowed) = (self.outstanding(lane), Vec::new());
                let trip = Trip { lane, range: None, capacity: 0, allowed, after };
                self.flights.push(Flight { handle: Handle::Nothing(flight), trip, flag: None });
            }
            Err(error) => self.submit_error(&error),
        }
    }
}
