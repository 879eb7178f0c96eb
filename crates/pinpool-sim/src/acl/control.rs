//! What tests ask of this library beside its own calls, and what its report says.

use std::fmt::Write;

use super::Library;
use super::world::{World, overlaps};

impl World {
    /// Answers a command that no other vendor has.
    pub fn own(&mut self, text: &str, words: &[&str], number: &dyn Fn(&str) -> usize) -> String {
        let on = |word: &str| word == "true";
        match *words {
            // An older library: see [`Library`].
            ["library", name] => self.library = Library::named(name),
            // Kills a device with that code.
            ["kill", device, code] => self.kill(number(device), number(code) as u32),
            // Whether a copy may still use this memory that had not ended when its device was lost.
            ["late", at, len] => {
                let (at, len) = (number(at), number(len));
                let uses = |side: &(usize, usize)| overlaps(at, len, side.0, side.1);
                return self.late.iter().flatten().any(uses).to_string();
            }
            // Whether the program is said to run on the device (RC mode). To be set before anything is allocated.
            ["rc", on_device] => self.on_device = on(on_device),
            // Whether every copy is of a whole segment, so that the distance between them can be checked.
            ["segments", whole] => self.whole_segments = on(whole),
            // How many streams each device has from now on.
            ["limit", streams] => self.stream_limit = number(streams),
            // How many bytes of page-locked memory one allocation may have, and all together.
            ["host", extent, all] => self.hosts.limit_to(number(extent), number(all)),
            // Whether product and driver can register memory.
            ["registers", can] => self.hosts.can_register = on(can),
            _ => panic!("no command: {text}"),
        }
        String::new()
    }

    /// One line each: `violation ID text`, `leak what count` (what is there, and what contexts had left when they were
    /// destroyed), `note what count`, `call name count`, `last name`, which call came last; and `over` when every
    /// device that was set was reset and every context that was made was destroyed, or was to be.
    pub fn report(&self) -> String {
        let leaks = [
            ("devices", self.devices.iter().map(|d| d.sets).sum()),
            ("contexts", self.contexts.values().filter(|c| c.explicit).count()),
        ];
        let more = [
            ("allocations", self.blocks.len()),
            ("hosts", self.hosts.count()),
            ("registrations", self.hosts.registrations()),
        ];
        let there = leaks.into_iter().chain(self.owned(None)).chain(more);
        // Counts though the call may have failed: these are the last calls that a program makes.
        let closed = ["aclrtResetDevice", "aclrtDestroyContext"];
        let over = closed.map(|name| self.made(name)).into_iter().sum::<u64>() >= self.opened;
        let mut all = self.common.report(there, over);
        let _ = writeln!(all, "last {}", self.last);
        all
    }
}
