//! What tests ask of a machine beside the vendor's own calls: commands, the report, and single steps.

use std::fmt::Write;
use std::time::Duration;

use crate::common::{Machine, Vendor};
use crate::world::{Fault, Place, World, overlaps};

impl World {
    /// Answers a command of a test: words with spaces between them.
    ///
    /// # Panics
    /// There is no such command.
    pub fn command(&mut self, text: &str) -> String {
        let words: Vec<&str> = text.split(' ').collect();
        let number = |word: &str| word.parse::<usize>().unwrap_or_else(|_| panic!("{text}: a number"));
        let on = |word: &str| word == "true";
        match words[..] {
            // A command that is made again after a reset.
            ["setup", ..] => {
                let command = &text["setup ".len()..];
                let answer = self.command(command);
                self.setup.push(command.to_owned());
                return answer;
            }
            // Of what threads have of their own, only the calling thread's part is reset.
            ["reset"] => {
                self.reset();
                self.vendor.enter(self.vendor.here());
            }
            ["report"] => return self.report(),
            // So many devices with so many bytes of memory each.
            ["devices", count, memory] => self.have_devices(number(count), number(memory)),
            // Makes the nth call of that name from now on fail once with a code: before it has done anything, or, with
            // `after`, when all is done. Codes after which a device, its context or the library is of no use have that
            // effect.
            ["fail", call, nth, code, after] => self.faults.push(Fault {
                call: call.into(),
                left: number(nth) as u64,
                code: number(code) as u32,
                after: on(after),
            }),
            // No call is to fail any more.
            ["calm"] => self.faults.clear(),
            // Whether the machine was set up by that command.
            ["is", ..] => return self.setup.iter().any(|command| command == &text[3..]).to_string(),
            // Writes down the names of calls from now on. `traced` gives them and ends that.
            ["trace"] => self.trace = Some(Vec::new()),
            ["traced"] => return self.trace.take().unwrap_or_default().join(" "),
            // How many threads call destructors of user objects.
            ["calling"] => return self.cuda.calling.to_string(),
            // How many calls were made to fail so far.
            ["struck"] => return self.struck.to_string(),
            // While it is set nothing runs: queries say "not ready", and a call that synchronises waits.
            ["hang", hung] => self.hung = on(hung),
            // Queries run nothing from now on, and the order of steps follows from the seed.
            ["by-hand", seed] => {
                self.by_hand = true;
                self.seed(seed.parse().unwrap_or_else(|_| panic!("{text}: a number")));
            }
            // While it is set, new streams get the handles of destroyed ones, as a driver's do.
            ["reuse", reuse] => self.reuse = on(reuse),
            // Ends a device, or on CUDA its primary context, with that code.
            ["kill", device, code] => {
                if let Some(context) = self.devices[number(device)].primary {
                    self.kill(context, number(code) as u32);
                }
            }
            // The library is not initialised.
            ["bare"] => self.ready = false,
            ["node", device, node] => self.devices[number(device)].numa_node = node.parse().unwrap_or(-1),
            // Another version of CUDA's driver, as `cuDriverGetVersion` counts.
            ["version", version] => self.cuda.version = number(version) as i32,
            // CUDA's next registration takes that many milliseconds beside its pages.
            ["first-pin", milliseconds] => {
                self.cuda.first_pin = Duration::from_millis(number(milliseconds) as u64);
            }
            // Gives GPUs another value of an attribute.
            ["attribute", attribute, value] => {
                self.cuda.attributes.insert(number(attribute) as i32, value.parse().unwrap_or(0));
            }
            // What a kernel's `malloc` gives on that GPU.
            ["malloc", device, len] => return self.device_malloc(number(device), number(len)).to_string(),
            // Memory of a GPU that is not `cuMemAlloc`'s in its primary context: see `other_memory`.
            ["memory", device, kind, len] => {
                return self.other_memory(number(device), number(kind), number(len)).to_string();
            }
            // An older Ascend library.
            ["library", name] => self.acl.old = name == "Of2024",
            // Whether an Ascend program is said to run on the device (RC mode). To be set before anything is allocated.
            ["rc", on_device] => self.acl.on_device = on(on_device),
            // Whether every copy of an Ascend device is of a whole segment, so that the distance between them can be
            // checked.
            ["segments", whole] => self.acl.whole_segments = on(whole),
            // Whether a copy may still use this memory that had not ended when its Ascend device was lost.
            ["late", at, len] => {
                let (at, len) = (number(at), number(len));
                let uses = |side: &(usize, usize)| overlaps(at, len, side.0, side.1);
                return self.acl.late.iter().flatten().any(uses).to_string();
            }
            _ => panic!("no command: {text}"),
        }
        String::new()
    }

    /// One line each: `violation ID call`; `leak what count`, which are there to be given back, those that contexts had
    /// left when they were destroyed among them; `call name count`; `flags name flags count` (how
    /// often a call was made with these flags); `last name`, the call that came last; and `over` when every use of a device was ended, or was to be.
    pub fn report(&self) -> String {
        let mut all = crate::end::late();
        for violation in &self.violations {
            let _ = writeln!(all, "violation {violation}");
        }
        let uses = self.devices.iter().map(|d| d.uses).sum();
        let (used, made) = match self.vendor {
            Vendor::Cuda => (0, uses),
            Vendor::Acl => {
                (uses, self.contexts.len() - self.devices.iter().filter_map(|d| d.primary).count())
            }
        };
        let [graphs, objects] = self.cuda.graphs.count();
        let first = [("devices", used), ("contexts", made)].into_iter().chain(self.owned(None));
        let last = [("registrations", self.registered.len()), ("graphs", graphs), ("objects", objects)];
        for (what, count) in first.chain(last) {
            let count = count + self.left.get(what).copied().unwrap_or(0);
            if count > 0 {
                let _ = writeln!(all, "leak {what} {count}");
            }
        }
        // Counts though the call may have failed: these are the last calls that a program makes.
        let ends = ["cuDevicePrimaryCtxRelease_v2", "aclrtResetDevice", "aclrtDestroyContext"];
        if ends.iter().filter_map(|name| self.counts.get(name)).sum::<u64>() >= self.opened {
            all.push_str("over\n");
        }
        for (name, count) in &self.counts {
            let _ = writeln!(all, "call {name} {count}");
        }
        for ((name, flags), count) in &self.flags {
            let _ = writeln!(all, "flags {name} {flags} {count}");
        }
        let _ = writeln!(all, "last {}", self.call);
        all
    }

    /// The streams of a device, or of all, whose next operation can run.
    pub fn runnable(&self, device: Option<usize>) -> Vec<usize> {
        let of = |context: usize| device.is_none_or(|device| self.contexts[&context].device == device);
        let can_run = |handle: &usize| {
            let stream = &self.streams[handle];
            let is_held = stream.held.is_some_and(|held| stream.done >= held);
            match stream.queue.front().filter(|_| !is_held && !self.hung) {
                Some(crate::world::Op::Wait { stream, upto }) => {
                    self.streams.get(stream).is_none_or(|s| s.done >= *upto)
                }
                first => first.is_some(),
            }
        };
        self.streams_of(of).into_iter().filter(can_run).collect()
    }

    /// Runs the next operation of one of these streams. `false`: there is none.
    pub fn step(&mut self, runnable: &[usize]) -> bool {
        if runnable.is_empty() {
            return false;
        }
        let handle = runnable[(self.random() % runnable.len() as u64) as usize];
        self.run(handle, self.streams[&handle].done + 1);
        true
    }

    /// The nth of a device's streams that were not destroyed, as they were made, or all of them.
    fn streams_on(&self, device: usize, nth: Option<usize>) -> Vec<usize> {
        let is_there = |context| self.contexts.get(&context).is_some_and(|c| c.device == device);
        let all = self.streams_of(is_there).into_iter().filter(|it| !self.streams[it].destroyed);
        all.skip(nth.unwrap_or(0)).take(nth.map_or(usize::MAX, |_| 1)).collect()
    }
}

/// For tests that move a world by hand (the command `by-hand`), many times a run. A device's streams are counted in the
/// order in which they were made, without those that were destroyed.
impl Machine {
    /// Runs one operation that can run, of any stream. `false`: there is none.
    pub fn step(self) -> bool {
        let mut world = self.world();
        let runnable = world.runnable(None);
        world.step(&runnable)
    }

    /// Runs the next operation of the nth of those of a device's streams that can run one, round and round. `false`: none
    /// can.
    pub fn step_runnable(self, device: usize, nth: usize) -> bool {
        let mut world = self.world();
        let runnable = world.runnable(Some(device));
        !runnable.is_empty() && world.step(&runnable[nth % runnable.len()..][..1])
    }

    /// How many operations of a device are queued.
    pub fn queued(self, device: usize) -> usize {
        let world = self.world();
        world.streams_on(device, None).iter().map(|handle| world.streams[handle].queue.len()).sum()
    }

    /// Holds what a device's nth stream has queued, and what follows: it runs only for a call that synchronises.
    /// `false`: there is no such stream.
    pub fn hold(self, device: usize, nth: usize) -> bool {
        let mut world = self.world();
        let streams = world.streams_on(device, Some(nth));
        for stream in &streams {
            world.streams.entry(*stream).and_modify(|stream| stream.held = Some(stream.done));
        }
        !streams.is_empty()
    }

    /// Nothing of a device's nth stream is held any more, or of all its streams.
    pub fn resume(self, device: usize, nth: Option<usize>) {
        let mut world = self.world();
        for stream in world.streams_on(device, nth) {
            world.streams.entry(stream).and_modify(|stream| stream.held = None);
        }
    }

    /// Makes a call fail.
    pub fn fail(self, fault: Fault) {
        self.world().faults.push(fault);
    }

    /// Whether a call is still to fail.
    pub fn is_armed(self) -> bool {
        self.world().faults.iter().any(|fault| fault.left > 0)
    }

    /// No call is to fail any more. Returns the faults that have not struck.
    pub fn calm(self) -> Vec<Fault> {
        let mut faults = std::mem::take(&mut self.world().faults);
        faults.retain(|fault| fault.left > 0);
        faults
    }

    /// Whether a device's primary context is of no use any more.
    pub fn is_lost(self, device: usize) -> bool {
        let world = self.world();
        let context = world.devices[device].primary.and_then(|context| world.contexts.get(&context));
        context.is_some_and(|context| context.dead.is_some())
    }

    /// What device memory holds now. No stream moves.
    pub fn read(self, address: u64, len: usize) -> Vec<u8> {
        self.world().bytes(Place::Device(address as usize), len)
    }
}
