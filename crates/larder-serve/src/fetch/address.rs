//! Which addresses are those of the public internet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Networks of IPv4 that are not public: the first address of each, and the bits that all of its addresses begin with.
const SPECIAL_V4: [(Ipv4Addr, u32); 15] = [
    // This host and network.
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    // Private networks.
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    // Between a carrier's translators of addresses and its customers.
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    // Loopback.
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    // Link-local; clouds have their metadata there.
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    // Private networks.
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    // Protocols.
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    // Documentation.
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    // Relays to IPv6.
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    // Private networks.
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    // Benchmarks of networks.
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    // Documentation.
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    // Multicast.
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    // Reserved, and broadcast.
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// The network of IPv6 in which all public addresses are. Outside of it are loopback, link-local, unique-local and
/// multicast addresses, and most of those that have an address of IPv4 in them.
const GLOBAL_V6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);

/// Networks in it that are not public either.
const SPECIAL_V6: [(Ipv6Addr, u32); 4] = [
    // Protocols, among them Teredo, whose addresses have one of IPv4 in them.
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    // Documentation.
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    // 6to4, whose addresses have one of IPv4 in them.
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    // Documentation.
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// Whether an address is one of the public internet.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !SPECIAL_V4.iter().any(|network| is_in_v4(address, *network)),
        IpAddr::V6(address) => {
            is_in_v6(address, GLOBAL_V6) && !SPECIAL_V6.iter().any(|network| is_in_v6(address, *network))
        }
    }
}

fn is_in_v4(address: Ipv4Addr, (first, bits): (Ipv4Addr, u32)) -> bool {
    (address.to_bits() ^ first.to_bits()).leading_zeros() >= bits
}

fn is_in_v6(address: Ipv6Addr, (first, bits): (Ipv6Addr, u32)) -> bool {
    (address.to_bits() ^ first.to_bits()).leading_zeros() >= bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_public_internet_are_public() {
        const PUBLIC: &str = "1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 \
            169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0 192.0.3.0 192.88.98.255 192.88.100.0 \
            192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 198.51.99.255 198.51.101.0 203.0.112.255 203.0.114.0 \
            223.255.255.255 2000::1 2001:200::1 2001:4860:4860::8888 2001:db7:ffff::1 2001:db9::1 2003::1 \
            2606:4700:4700::1111 2a00:1450::1 3ffe:ffff::1 3fff:1000::1";
        const SPECIAL: &str = "0.0.0.0 0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.127.255.255 127.0.0.0 127.0.0.1 \
            127.255.255.255 169.254.0.0 169.254.169.254 169.254.255.255 172.16.0.0 172.31.255.255 192.0.0.0 192.0.0.170 \
            192.0.2.0 192.0.2.255 192.88.99.1 192.168.0.0 192.168.255.255 198.18.0.0 198.19.255.255 198.51.100.7 \
            203.0.113.255 224.0.0.0 239.255.255.255 240.0.0.0 255.255.255.255 :: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:0:0 \
            ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::1 100::1 1fff:ffff::1 2001::1 \
            2001:0:4136:e378::1 2001:10::1 2001:20::1 2001:1ff:ffff::1 2001:db8:: 2001:db8:ffff::1 2002::1 2002:7f00:1::1 \
            2002:ffff:ffff::1 3fff::1 3fff:fff:ffff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254 fdff:ffff::1 fe80::1 febf::1 \
            fec0::1 ff02::1 ffff::1";
        for (addresses, wanted) in [(PUBLIC, true), (SPECIAL, false)] {
            for address in addresses.split_whitespace() {
                assert_eq!(is_public(address.parse().unwrap()), wanted, "{address}");
            }
        }
    }
}
